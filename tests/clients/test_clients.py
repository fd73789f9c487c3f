"""Real users of `fully_shard`, unmodified but for the import: Hugging Face models, PEFT,
Accelerate, Lightning Fabric, timm.

`make test-clients` installs them and runs this; otherwise these tests are skipped and say so.
"""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.oracle import communications, mesh_of
from torch._dynamo.utils import counters

import compiled_fsdp
import compiled_fsdp.compiler.backend as backend_module
from compiled_fsdp import explain, fully_shard, planned, replace_stock
from compiled_fsdp.ir.collectives import STARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.pool import Pool
    from torch import Tensor, nn


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)}: run `make test-clients`"
    )


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama(**options: Any) -> tuple[nn.Module, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SMALL, **options}, num_key_value_heads=2)
    return LlamaForCausalLM(config), "model.layers"


def llama_tied() -> tuple[nn.Module, str]:
    return llama(tie_word_embeddings=True)


def mixtral() -> tuple[nn.Module, str]:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    ), "model.layers"


def qwen3_moe() -> tuple[nn.Module, str]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_key_value_heads=2, head_dim=8, **experts)
    ), "model.layers"


def bert(**options: Any) -> tuple[nn.Module, str]:
    from transformers import BertConfig, BertForMaskedLM

    options = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **options}
    config = BertConfig(**options)
    return BertForMaskedLM(config), "bert.encoder.layer"


MODELS: dict[str, Callable[..., tuple[Any, str]]] = {
    f.__name__: f for f in (llama, llama_tied, mixtral, qwen3_moe, bert)
}


def tokens(step: int = 0) -> Tensor:
    return torch.randint(
        0, 60, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
    )


def loss_of(call: Any, step: int) -> Tensor:
    loss: Tensor = call(input_ids=tokens(step), labels=tokens(step)).loss
    return loss


def check_grads(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            mean = q.grad.clone()
            dist.all_reduce(mean)
            assert torch.allclose(p.grad.full_tensor(), mean / dist.get_world_size(), atol=1e-5), (
                name
            )


@contextmanager
def captured() -> Iterator[list[Any]]:
    """The final forward and backward graphs of ours that `compiled_fsdp_eager` makes inside."""
    found: list[Any] = []
    original = backend_module.run_half

    def run_half(gm: Any) -> Any:
        result = original(gm)
        found.append(Counter(n.target for n in result.graph.nodes if n.target in STARTS))
        return result

    backend_module.run_half = run_half
    try:
        yield found
    finally:
        backend_module.run_half = original


def unsharded_graphs(model: Any, run: Callable[[Any], Any]) -> tuple[int, int]:
    """Graphs and graph breaks of the same model as it is."""
    torch._dynamo.reset()
    counters.clear()
    run(torch.compile(copy.deepcopy(model), backend="aot_eager"))
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    return found


def check_graphs(before: tuple[int, int], halves: list[Any], seen: dict[str, int]) -> None:
    """No more graphs or breaks than unsharded, and what is communicated in a step is inside the
    graphs.
    """
    after = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    assert after <= before, f"(graphs, breaks): {after} sharded, {before} unsharded"
    inside = sum(sum(half.values()) for half in halves)
    assert inside == seen["gather"] + seen["reduce"], (halves, seen)


def shard_layers(model: Any, path: str, **options: Any) -> Any:
    for layer in model.get_submodule(path):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@needs("transformers")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face(two: Pool, name: str, backend: str | None) -> None:
    """Compiled as one whole graph; the gathers are counted, since Dynamo can skip a frame without
    reporting a break.
    """
    breaks = two.run(hugging_face, name, backend)[0]
    if breaks:
        pytest.skip(
            f"{name} of the installed transformers breaks its graph {breaks} times unsharded, on "
            "this torch"
        )


def hugging_face(name: str, backend: str | None) -> int:
    """How often the model breaks its graph unsharded; then nothing else was tried with a
    backend.
    """
    torch.manual_seed(0)
    model, path = MODELS[name]()
    reference = copy.deepcopy(model)
    before = unsharded_graphs(model, lambda call: loss_of(call, 0).backward())
    if backend and before[1]:
        return before[1]
    shard_layers(model, path)
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    with captured() as halves:
        seen = train_two_steps(model, call, reference)
    assert seen["gather"] in (5, 6), (
        "three units in forward, the two blocks (in a graph also what backward reads of the root) "
        "again"
    )
    assert seen["reduce"] == 3
    if backend:
        check_graphs(before, halves, seen)
    return 0


@needs("transformers")
@pytest.mark.parametrize("regions", ["auto", "units"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_equal_layers(two: Pool, name: str, regions: str) -> None:
    """Four, so that the default compiles them once,
    and "units" traces them once, caches included.
    """
    two.run(equal_layers, name, regions, timeout=400.0)


def equal_layers(name: str, regions: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, path = MODELS[name](num_hidden_layers=4)
    reference = copy.deepcopy(model)
    shard_layers(model, path)
    backend = "inductor" if regions == "auto" else "compiled_fsdp_eager"
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with planned(regions=regions):
        seen = train_two_steps(model, call, reference)
    assert seen["gather"] in (9, 10)
    assert seen["reduce"] == 5
    for graph in explain(model).graphs if regions == "units" else ():
        assert max(region["calls"] for region in graph.regions) >= 3, graph.regions


def train_two_steps(
    model: Any, call: Any, reference: Any, loss_of: Callable[[Any, int], Tensor] = loss_of
) -> dict[str, int]:
    """Beside the unsharded model; what the second step communicates."""
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        seen = communications(lambda step=step: loss_of(call, step).backward())
        loss_of(reference, step).backward()
        check_grads(model, reference)
    return seen


@needs("transformers")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_native_expert_parallelism(
    two: Pool, tmp_path: Path, name: str, backend: str | None
) -> None:
    """Its own plan, dispatcher and calls of `fully_shard`. Compiled, but not as one graph: its
    dispatcher asks whether a rank has got any token.
    """
    two.run(native_expert_parallelism, name, backend, str(tmp_path))


def native_expert_parallelism(name: str, backend: str | None, folder: str) -> None:
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    reference = MODELS[name]()[0]
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="all_to_all")
    with replace_stock():
        model: Any = type(reference).from_pretrained(folder, distributed_config=config)
    assert isinstance(model, compiled_fsdp.FSDPModule)
    call = torch.compile(model, backend=backend) if backend else model
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        ours, theirs = loss_of(call, step), loss_of(reference, step)
        assert torch.allclose(ours, theirs, atol=1e-5)
        ours.backward()
        theirs.backward()
        check_grads(model, reference)


@needs("transformers")
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_generate(two: Pool, name: str) -> None:
    two.run(generate, name)


def generate(name: str) -> None:
    torch.manual_seed(0)
    model, path = MODELS[name]()
    reference = copy.deepcopy(model)
    shard_layers(model, path)
    prompt = torch.arange(4)[None]
    ours, theirs = (
        m.eval().generate(prompt, max_new_tokens=5, do_sample=False) for m in (model, reference)
    )
    assert torch.equal(ours, theirs)


@needs("transformers", "peft")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
def test_peft_lora(two: Pool, backend: str | None) -> None:
    two.run(peft_lora, backend)


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama()[0], config)


def peft_lora(backend: str | None) -> None:
    model = with_lora()
    reference = copy.deepcopy(model)
    before = unsharded_graphs(model, lambda call: loss_of(call, 0).backward())
    shard_layers(model, "base_model.model.model.layers")
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    with captured() as halves:
        seen = train_two_steps(model, call, reference)
    assert seen["reduce"] == 2, "only the units with LoRA weights have anything to reduce"
    if backend:
        check_graphs(before, halves, seen)


@needs("transformers", "peft")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
def test_peft_merged_and_back(two: Pool, backend: str | None) -> None:
    """Adapters added to the sharded weights and taken out again, and left out of a forward, between
    steps: the graphs that were compiled before compute with what is there.
    """
    two.run(merged_and_back, backend)


def merged_and_back(backend: str | None) -> None:
    model = with_lora()
    reference = copy.deepcopy(model)
    shard_layers(model, "base_model.model.model.layers")
    call = torch.compile(model, backend=backend) if backend else model

    def same(kind: str) -> None:
        with torch.no_grad():
            ours, theirs = loss_of(call, 7), loss_of(reference, 7)
        assert torch.allclose(ours, theirs, atol=1e-5), kind
        found.append(theirs)

    found: list[Tensor] = []
    train_two_steps(model, call, reference)
    same("with adapters")
    with model.disable_adapter(), reference.disable_adapter():
        same("without")
    for one in (model, reference):
        one.merge_adapter()
    same("merged")
    for one in (model, reference):
        one.unmerge_adapter()
    same("taken out again")
    assert abs(found[0] - found[1]) > 1e-3, "the adapters make a difference"
    train_two_steps(model, call, reference)


@needs("transformers")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
def test_gradient_checkpointing(two: Pool, backend: str | None) -> None:
    """Of transformers: turned on before sharding, off between steps, and on again."""
    two.run(gradient_checkpointing, backend)


def gradient_checkpointing(backend: str | None) -> None:
    torch.manual_seed(0)
    model: Any
    model, path = llama(use_cache=False)
    reference = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    shard_layers(model.train(), path)
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    for switch in (None, model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        if switch is not None:
            switch()
        seen = train_two_steps(model, call, reference)
        assert seen["reduce"] == 3


# -- Accelerate


@needs("transformers", "accelerate")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_accelerate(two: Pool, name: str, checkpoints: bool, backend: str | None) -> None:
    """Its own preparation; on CPU its `Accelerator` takes DDP instead, so what that calls for FSDP2
    is called here.
    """
    two.run(accelerated, name, checkpoints, backend)


def accelerated(name: str, checkpoints: bool, backend: str | None) -> None:
    """Layers in checkpoint wrappers, then `torch.compile`, then `fully_shard`: of layers, the
    embedding, lists, and the root.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    torch.manual_seed(0)
    model, _ = MODELS[name]()
    reference = copy.deepcopy(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        torch_device_mesh=mesh_of(2, names=("dp_shard",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0,
    )
    plugin.set_auto_wrap_policy(model)
    if checkpoints:
        model.config.use_cache = (
            False  # as Trainer does: the recomputation would append to the cache a second time
        )
        model = fsdp_utils.fsdp2_apply_ac(accelerator, model)
    before = unsharded_graphs(model, lambda call: loss_of(call, 0).backward())
    prepared: Any = torch.compile(model, backend=backend) if backend else model
    with replace_stock(), captured() as halves:
        prepared = fsdp_utils.fsdp2_prepare_model(accelerator, prepared)
        seen = train_two_steps(model, prepared, reference)
    assert seen["reduce"] == (3 if name == "llama_tied" else 4), (
        "two layers, the embedding, the norm with the head"
    )
    if backend:
        check_graphs(before, halves, seen)
    names = fsdp_utils.fsdp2_canonicalize_names(dict(prepared.named_parameters()))
    assert list(names) == list(dict(reference.named_parameters()))


# -- timm


@pytest.mark.skipif(
    find_spec("timm") is None or find_spec("torchvision") is None,
    reason="needs timm, and a torchvision that was built for the very torch that is there: "
    "`make test-clients` installs neither",
)
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_timm(two: Pool, name: str, backend: str | None) -> None:
    two.run(vision, name, backend)


def vision(name: str, backend: str | None) -> None:
    import timm

    torch.manual_seed(0)
    if name == "vit":
        model = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=4,
            num_classes=5,
        )
        blocks: Any = model.blocks
    else:
        model = timm.create_model("resnet10t", num_classes=5)
        blocks = [model.layer1, model.layer2, model.layer3, model.layer4]
    reference = copy.deepcopy(model)
    before = unsharded_graphs(model, lambda call: image_loss(call, 0).backward())
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    with captured() as halves:
        seen = train_two_steps(model, call, reference, image_loss)
    assert seen["reduce"] == len(blocks) + 1
    if backend:
        check_graphs(before, halves, seen)


def image_loss(call: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss: Tensor = call(torch.randn(2, 3, 32, 32, generator=generator)).square().mean()
    return loss


@needs("transformers", "lightning")
def test_lightning_fabric(two: Pool) -> None:
    two.run(lightning_fabric)


def lightning_fabric() -> None:
    """Fabric's model-parallel strategy shards by a function of the user's, with a mesh of
    Fabric's.
    """
    import os

    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy

    os.environ.update(
        LOCAL_RANK=str(dist.get_rank()),
        RANK=str(dist.get_rank()),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT="29999",
        TORCHELASTIC_RUN_ID="test",
    )

    def parallelize(model: Any, mesh: Any) -> Any:
        return shard_layers(model, "model.layers", mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model, _ = llama()
    reference = copy.deepcopy(model)
    wrapped: Any = fabric.setup(model)
    ours = fabric.setup_optimizers(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        loss, expected = loss_of(wrapped, step), loss_of(reference, step)
        assert torch.allclose(loss, expected, atol=1e-5)
        fabric.backward(loss)
        expected.backward()
        for q in reference.parameters():
            dist.all_reduce(q.grad)
            q.grad /= 2
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


@needs("transformers")
@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
def test_tied_after_sharding(two: Pool, backend: str | None) -> None:
    """A tied model that is sharded before its weights are tied, as transformers does when it loads
    one sharded.
    """
    two.run(tied_after_sharding, backend)


def tied_after_sharding(backend: str | None) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def build() -> Any:
        torch.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
        )

    reference, model = build(), build()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    shard_layers(model, "model.layers")
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    for step in range(3):
        for kind, one in ((call, model), (reference, reference)):
            loss_of(kind, step).backward()
            if one is reference:
                check_grads(model, reference)
                for p in reference.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            else:
                assert model.dtype == torch.float32
        for one in (model, reference):
            for p in one.parameters():
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None
