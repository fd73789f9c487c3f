"""Models of many kinds from transformers, sharded layer by layer as one would who knows nothing of
them: each list of modules gives its members a unit.
Eagerly and in graphs they train as the unsharded model.

`make test-clients` installs transformers and runs this;
otherwise these tests are skipped and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import whole
from torch import nn

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.pool import Pool
    from torch import Tensor

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: run `make test-clients`"
)

STEPS = 2
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4}
TEXT: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 64, **WIDTHS, **LAYERS}
SILENT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES: dict[str, Any] = {**WIDTHS, **LAYERS, "image_size": 32, "patch_size": 8}
PAIRS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    **TEXT,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


@dataclass(frozen=True)
class Kind:
    """A model: its class and its configuration's, what that is given, and the kind of a batch."""

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: str = "tokens"


KINDS: dict[str, Kind] = {
    "heads that embed, biases that all layers share": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 1,
        },
        "pairs",
    ),
    "one layer called three times": Kind(
        "AlbertForMaskedLM", "AlbertConfig", {**TEXT, **SILENT, "embedding_size": 16}
    ),
    "positions relative to each other": Kind(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **TEXT,
            **SILENT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "two streams": Kind(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "n_layer": 3,
            "n_head": 4,
            "d_inner": 48,
            "dropout": 0.0,
        },
    ),
    "slopes for positions": Kind(
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "n_layer": 3,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "waves, and a weight that is normed": Kind(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **WIDTHS,
            **LAYERS,
            "conv_dim": (16, 16),
            "conv_kernel": (10, 3),
            "conv_stride": (5, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            **dict.fromkeys(
                ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"),
                0.0,
            ),
        },
        "waves",
    ),
    "two towers and a scale": Kind(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**TEXT, "max_position_embeddings": 16, "eos_token_id": 2},
            "vision_config": IMAGES,
            "projection_dim": 16,
        },
        "captions",
    ),
    "sounds to text": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**PAIRS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16},
        "sounds",
    ),
    "sinks, windows and experts": Kind(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**EXPERTS, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
    ),
    "tied, logits that are capped": Kind(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4,
        },
    ),
    "state spaces, attention and experts in turns": Kind(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "latent attention, experts that all share": Kind(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
}


def made(kind: Kind) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind.config)(**kind.options)
    model: nn.Module = getattr(transformers, kind.model)(config).train()
    for module in model.modules():  # `fully_shard` cuts no scalars; it says to do this
        for name, p in list(module.named_parameters(recurse=False)):
            if p.dim() == 0:
                setattr(module, name, nn.Parameter(p.detach().reshape(1)))
    return model


def loss_of(call: Any, batch: str, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    loss: Tensor
    if batch == "waves":
        return call(input_values=torch.randn(2, 800))[0].square().mean()  # type: ignore[no-any-return]
    if batch == "sounds":
        loss = call(input_features=torch.randn(2, 8, 40), labels=torch.randint(3, 60, (2, 8))).loss
        return loss
    tokens = torch.randint(3, 60, (4, 8))
    labels = tokens[:, :4].contiguous() if batch == "pairs" else tokens
    if batch == "captions":
        images = torch.randn(4, 3, 32, 32)
        loss = call(input_ids=tokens, pixel_values=images, return_loss=True).loss
    else:
        loss = call(input_ids=tokens, labels=labels).loss
    return loss


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, of the outermost lists."""
    for child in model.children():
        members = list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        having = [member for member in members if any(True for _ in member.parameters())]
        if len(having) >= 2:
            yield from having
        else:
            yield from layers(child)


def trained(kind: Kind, way: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and parameters after two steps."""
    torch._dynamo.reset()
    model = made(kind)
    if way != "unsharded":
        for layer in layers(model):
            fully_shard(layer)
        fully_shard(model)
    call = torch.compile(model, backend="compiled_fsdp_eager") if way == "graphs" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = loss_of(call, kind.batch, step)
        loss.backward()
        for p in model.parameters() if way == "unsharded" else ():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: whole(p.detach()) for name, p in model.named_parameters()}


def as_unsharded(name: str) -> None:
    kind = KINDS[name]
    losses, parameters = trained(kind, "unsharded")
    for way in ("eager", "graphs"):
        found, values = trained(kind, way)
        for ours, expected in zip(found, losses, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=way)
        assert values.keys() == parameters.keys()
        for (
            fqn,
            value,
        ) in values.items():  # sums over ranks, and of a weight's gradients, in an order
            torch.testing.assert_close(
                value, parameters[fqn], rtol=1e-5, atol=1e-6, msg=f"{way}: {fqn}"
            )


@pytest.mark.parametrize("name", KINDS)
def test_trains_as_unsharded(two: Pool, name: str) -> None:
    two.run(as_unsharded, name, timeout=400.0)
