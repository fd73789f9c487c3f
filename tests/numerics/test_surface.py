"""What training scripts do around a sharded model: checkpointing, ties, freezing, growing inputs,
exceptions, meta init.

Each case trains ours (eager, and compiled without Inductor) beside the unsharded model, and counts
what is communicated.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.harness import SLOW
from kit.models import Block, Net
from kit.oracle import Api, communications, each, mesh_of, no_recompiles
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from compiled_fsdp import MixedPrecisionPolicy, errors, fully_shard
from compiled_fsdp.frontend.first_call import check_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


def batch(step: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(
        rows, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
    )


def pair(model: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    """The model with each layer a unit, and a copy of it as it was."""
    reference = copy.deepcopy(model)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options), reference


def backward(call: Any, inputs: Tensor) -> Tensor:
    loss = call(inputs).float().square().mean()
    loss.backward()
    return loss.detach()


def check_grads(model: nn.Module, reference: nn.Module, atol: float = 1e-6) -> None:
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        q = theirs[name]
        if q.grad is None:
            assert p.grad is None, f"{name} has a gradient"
            continue
        mean = q.grad.clone()
        dist.all_reduce(mean)
        assert p.grad is not None, f"{name} has no gradient"
        assert torch.allclose(p.grad.full_tensor(), mean / dist.get_world_size(), atol=atol), name


def both(observe: Callable[[Api], None]) -> Callable[[Any], None]:
    """A test that runs `observe` on two ranks for ours eager and compiled."""

    def test(two: Pool) -> None:
        two.run(each, observe)

    return test


# -- activation checkpointing


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def not_reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.addmm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


contexts = partial(create_selective_checkpoint_contexts, save_matmuls)


def selective(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that one forward keeps for backward, parameters left out; each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


@pytest.mark.parametrize("around", [reentrant, not_reentrant, selective], ids=lambda f: f.__name__)
def test_activation_checkpointing(two: Pool, around: Any) -> None:
    """No gather more than without, the right gradients; and less saved, as unsharded."""
    two.run(each, checkpointing, around)


def checkpointing(api: Api, around: Any) -> None:
    model, reference = pair(Net(around))
    call = api.compile(model, fullgraph=around is not reentrant)
    for step in range(2):
        model.zero_grad()
        seen = communications(lambda step=step: backward(call, batch(step, rows=64)))
    backward(reference, batch(1, rows=64))
    check_grads(model, reference)
    assert seen == {"gather": 5, "reduce": 3, "all_reduce": 0}, (api.kind, seen)
    if around is not_reentrant:
        plain, _ = pair(Net())
        plain_call = api.compile(plain)
        backward(plain_call, batch(rows=64))
        model.zero_grad()
        assert saved_bytes(lambda: call(batch(rows=64))) < saved_bytes(
            lambda: plain_call(batch(rows=64))
        )


# -- ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.layers = nn.ModuleList([Block()])
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x[:, :5].abs() * 7).long() % 11)
        return self.head(self.layers[0](x))


@pytest.mark.parametrize("alone", [("head",), ("embed", "head")], ids=str)
def test_tied_over_units(two: Pool, alone: tuple[str, ...]) -> None:
    """Stock raises at the first forward. Gathered once a phase in a graph, reduced once, and still
    one object.
    """
    two.run(each, tied, alone)


def tied(api: Api, alone: tuple[str, ...]) -> None:
    model = Tied()
    reference = copy.deepcopy(model)
    for name in (*alone, "layers.0"):
        fully_shard(model.get_submodule(name))
    call = api.compile(fully_shard(model))
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        seen = communications(lambda step=step: backward(call, batch(step)))
        backward(reference, batch(step))
        check_grads(model, reference)
        assert model.head.weight is model.embed.weight
    assert seen["reduce"] == 2
    if api.is_compiled:
        assert seen["gather"] == 4 if alone else 3
    names = list(model.state_dict())
    assert names == list(reference.state_dict())


# -- a larger function that is compiled, parameters that stay


def test_whole_step_compiled(two: Pool) -> None:
    """What happens before each call of a sharded module happens while tracing, and the graph guards
    on what it depends on.
    """
    two.run(whole_step)


def whole_step() -> None:
    model, reference = pair(Net())

    @torch.compile(backend="compiled_fsdp_eager", fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    changes = ((), ((0, True),), ((1, False),), (), ((1, True), (0, False)))
    for step, changed in enumerate(changes):
        for m in (model, reference):
            m.zero_grad()
            for layer, value in changed:
                for p in m.layers[layer].parameters():
                    p.requires_grad = value
        loss_of(batch(step)).backward()
        backward(reference, batch(step))
        check_grads(model, reference)
    model.zero_grad()
    assert communications(lambda: loss_of(batch()).backward())["reduce"] == 2


def test_whole_step_compiled_checks_first(two: Pool) -> None:
    two.run(checks_first)


def checks_first() -> None:
    model = Net()
    if dist.get_rank() == 1:
        model.layers[1].first = nn.Linear(6, 24, bias=False)
    model, _ = pair(model)
    with pytest.raises(RuntimeError, match="the ranks of a shard group have different models"):
        torch.compile(lambda x: model(x), backend="compiled_fsdp_eager")(batch())


def staying(api: Api) -> None:
    """`set_reshard_after_backward(False)` for several backwards before one step: gathered once,
    from the optimizer's step on.
    """
    model = Net()
    reference = copy.deepcopy(model)
    for module in (*model.layers, model):
        fully_shard(module, reshard_after_forward=False)
    call = api.compile(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    with no_recompiles():
        for step in range(2):
            gathers = []
            for micro in range(3):
                model.set_reshard_after_backward(micro == 2)
                x = batch(3 * step + micro)
                gathers.append(communications(lambda x=x: backward(call, x))["gather"])
                backward(reference, x)
            assert gathers[1:] == [0, 0], gathers
            check_grads(model, reference)
            for q in reference.parameters():
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert gathers[0] == 3
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.set_reshard_after_backward(False)
    backward(call, batch())
    ours.step()
    for module in (*model.layers, model):
        assert not module._get_fsdp_state().unit.is_resident
        module.reshard()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        q.data = p.full_tensor()
    backward(call, batch())
    model.state_dict()
    assert communications(lambda: backward(call, batch()))["gather"] == 3, "state_dict reshards"
    model.reshard()
    with torch.no_grad():
        assert torch.allclose(call(batch()), reference(batch()), atol=1e-6)


test_staying_unsharded = both(staying)


def test_staying_cannot_be_had(two: Pool) -> None:
    two.run(cannot_stay)


def cannot_stay() -> None:
    model, _ = pair(Net())
    model.set_reshard_after_backward(False)
    with pytest.warns(
        UserWarning,
        match=r"set_reshard_after_backward\(False\) on 'layers\.0' changes nothing in a graph "
        "while",
    ):
        backward(torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True), batch())
    errors._said.clear()
    with pytest.warns(
        UserWarning,
        match=r"'Net' changes nothing where the call of the sharded module is compiled as part of",
    ):
        torch.compile(lambda x: model(x), backend="compiled_fsdp_eager")(batch())


# -- modes, inputs


def growing_inputs(api: Api) -> None:
    """A `generate`-like loop: after the second length no recompiles."""
    model, reference = pair(Net())
    call = api.compile(model)
    with torch.no_grad():
        for rows in range(3, 12):
            if rows == 6:
                graphs = counters["stats"]["unique_graphs"]
            assert torch.allclose(call(batch(rows=rows)), reference(batch(rows=rows)), atol=1e-6)
    assert counters["stats"]["unique_graphs"] == graphs
    backward(call, batch())
    backward(reference, batch())
    check_grads(model, reference)


def fp16_with_a_scaler(api: Api) -> None:
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32))
    call, scaler = api.compile(model), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(6):
        loss = call(batch()).square().mean()
        scaler.scale(loss).backward()
        if step == 3 and dist.get_rank() == 0:
            model.head.weight.grad.to_local().fill_(float("inf"))
        before = model.head.bias.to_local().clone()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.head.bias.to_local()) == (step == 3), (
            f"one rank overflows: all skip; {step=}"
        )
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scaler.get_scale() == 2.0**7


def clipping(api: Api) -> None:
    model = Net()
    model.layers[0].first.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(5))
    model, reference = pair(model)
    call = api.compile(model)
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        model.zero_grad()
        reference.zero_grad()
        backward(call, batch())
        backward(reference, batch())
        for q in reference.parameters():
            if q.grad is not None:
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
        ours, theirs = (
            nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=norm_type)
            for m in (model, reference)
        )
        assert torch.allclose(ours.full_tensor(), theirs), norm_type
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert q.grad is None or torch.allclose(p.grad.full_tensor(), q.grad)


test_growing_inputs = both(growing_inputs)
test_fp16_with_a_scaler = both(fp16_with_a_scaler)
test_clipping = both(clipping)


# -- exceptions


class Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails:
            raise ValueError("boom")
        return y


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("boom")


class Gated(nn.Module):
    """Some have a parameter under a name under which others hold a plain value."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h if self.scale is None else h * self.scale


def plain_values() -> None:
    for scale in (nn.Parameter(torch.full((4,), 3.0)), None, 2.0):
        model = fully_shard(Gated(scale))
        x = torch.ones(2, 4)
        out = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(x)
        assert torch.equal(out, model(x))
        out.sum().backward()
    model.scale = 5.0
    assert torch.equal(
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(x), model(x)
    )


def test_a_plain_value_where_others_of_the_class_have_a_parameter(two: Pool) -> None:
    """Their class has a property of that name; up to torch 2.12, Dynamo asks it even for what the
    `__dict__` holds.
    """
    two.run(plain_values)


def test_after_an_exception(two: Pool) -> None:
    """Without `reset_iter_state` the next iteration notices; stock leaves it undefined."""
    two.run(each, after_an_exception)


def after_an_exception(api: Api) -> None:
    model = Net()
    model.layers[1] = Fails()
    model, reference = pair(model)
    call = api.compile(model)
    model.layers[1].fails = True
    with pytest.raises(Exception, match="boom"):  # Dynamo has a type of its own for it
        call(batch())
    model.layers[1].fails = False
    backward(call, batch())
    backward(reference, batch())
    check_grads(model, reference)
    model.zero_grad()
    handle = model.layers[1].register_forward_hook(
        lambda module, args, out: FailsInBackward.apply(out)
    )
    with pytest.raises(ValueError, match="boom"):
        backward(model, batch())
    handle.remove()
    model.zero_grad()
    backward(call, batch())
    check_grads(model, reference)


# -- meta init and state


class WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


def meta_init(api: Api) -> None:
    reference = WithBuffers()
    with torch.device("meta"):
        model: Any = WithBuffers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"embed\.weight.*meta device.*to_empty"):
        model(batch())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, reference.state_dict(), options=options)
    with pytest.raises(
        RuntimeError, match=r"buffers scale hold whatever was in memory.*reset_parameters"
    ):
        model(batch())
    model.scale.fill_(1.0 + dist.get_rank())
    call = api.compile(model)
    with pytest.warns(UserWarning, match=r"buffers scale differ between the ranks"):
        call(batch())
    reference.scale.fill_(1.0 + dist.get_rank())
    model.zero_grad()
    backward(call, batch())
    backward(reference, batch())
    check_grads(model, reference)


test_meta_init = both(meta_init)


def test_checkpoints_cross_over(two: Pool, four: Pool) -> None:
    """Saved at two ranks, compiled; loaded at two replicas of two shards, eager, and unsharded: the
    same next step.
    """
    with tempfile.TemporaryDirectory() as folder:
        full = two.run(save, folder)[0]
        four.run(load, folder, full)
    assert list(full) == list(Net().state_dict())


def trained(model: Any, call: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    backward(call, x)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, _ = pair(Net())
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = trained(model, call)
    state = {
        "model": get_model_state_dict(call),
        "optimizer": get_optimizer_state_dict(call, optimizer),
    }
    assert not any("_orig_mod" in name for name in state["model"])
    dcp.save(state, checkpoint_id=folder)
    return get_model_state_dict(call, options=StateDictOptions(full_state_dict=True))


def load(folder: str, full: dict[str, Tensor]) -> None:
    torch.manual_seed(9)
    model, _ = pair(Net(), mesh=mesh_of(2, 2, names=("replicate", "shard")))
    optimizer = trained(model, model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    torch.manual_seed(0)
    reference = Net()
    theirs = trained(reference, reference)
    for name, p in reference.named_parameters():
        assert torch.allclose(p, full[name], atol=1e-6)
    for m, o in ((model, optimizer), (reference, theirs)):
        m.zero_grad()
        backward(m, torch.randn(4, 6, generator=torch.Generator().manual_seed(2)))
        o.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.full_tensor(), q, atol=1e-6)


# -- mistakes


def test_optimizer_built_before_sharding(two: Pool) -> None:
    two.run(optimizer_before)


def optimizer_before() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = pair(model)
    backward(model, batch())
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "SGD.step: fully_shard replaced 12 of its parameters ('embed.weight' is the first) after "
        "the optimizer was built, so the step would change nothing that the model uses. Build the "
        "optimizer after fully_shard"
    )


def test_ranks_with_different_models(two: Pool) -> None:
    two.run(different_models)


def different_models() -> None:
    model = Net()
    if dist.get_rank() == 1:
        model.layers[1].first = nn.Linear(6, 24, bias=False)
    model, _ = pair(model)
    with pytest.raises(RuntimeError) as caught:
        model(batch())
    assert str(caught.value) == (
        "fully_shard: the ranks of a shard group have different models:\n"
        "  rank 0: 12 parameters; not on all ranks: layers.1.first.bias: (24,) torch.float32\n"
        "  rank 1: 11 parameters; not on all ranks: none: some are missing, or the order differs"
    )


def test_a_unit_that_nobody_reads(two: Pool) -> None:
    two.run(each, nobody_reads)


def nobody_reads(api: Api) -> None:
    model = Net()
    model.idle, model.empty = nn.Linear(4, 4), nn.Tanh()
    for module in (model.idle, model.empty, *model.layers, model):
        fully_shard(module)
    call = api.compile(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            call(batch())
        for step in range(3):
            backward(call, batch(step))
    assert [str(w.message) for w in caught if "not gathered" in str(w.message)] == [
        "compiled_fsdp: unit 'idle' was not gathered in the first step: nothing called its forward "
        "or read its 2 parameters, so that step has not trained them. If another method than "
        "forward uses them, call register_fsdp_forward_method(module, name) for it. Where other "
        "steps call it (layer drop, a choice of experts), they train it"
    ]


class KeepsInList(Net):
    """Reads a parameter from a list that was made before it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[0].first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.kept[0].sum()


def test_a_parameter_kept_from_before_it_was_cut(two: Pool) -> None:
    two.run(each, kept_from_before)


def kept_from_before(api: Api) -> None:
    model = KeepsInList()
    model(batch()).sum().backward()  # its gradient is none of the sharded model's
    model, _ = pair(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(api.compile(model), batch())
    assert [str(w.message) for w in caught if "kept" in str(w.message)] == [
        "compiled_fsdp: layers.0.first.weight has got a gradient as it was before fully_shard: "
        "something has kept that tensor (a list or a closure that forward reads, a module outside "
        "of the sharded one) and computes with it. The model has had another in its place since, "
        "so that no step of its optimizer changes what is computed, as with torch's FSDP2. Read it "
        "from its module in forward (self.weight)"
    ]


def test_a_list_of_parameters_from_before_they_were_cut(two: Pool) -> None:
    two.run(listed_before)


def listed_before() -> None:
    """A list is told after a step, and nothing is said of the variable of a loop."""
    model, texts = Net(), []
    kept = list(model.parameters())
    for _ in range(2):
        for _held in model.parameters():
            pass
        model, _ = pair(model)
        errors._said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                backward(model, batch(step))
        texts.append([str(w.message) for w in caught if "as they were" in str(w.message)])
        kept.clear()
        model = Net()
    assert texts == [
        [
            "compiled_fsdp: something (a list of parameters(), a dict, a closure) has kept "
            "parameters as they were before fully_shard, whole: layers.0.first.weight, "
            "layers.0.first.bias, layers.0.second.weight and 9 more. What is done with them, "
            "clip_grad_norm_ or p.grad = None or an average, does not come to the model, as with "
            "torch's FSDP2, and their memory is not freed. Make such lists after fully_shard, or "
            "drop them"
        ],
        [],
    ]


class ReadsAnother(Net):
    """Uses the weight of a unit that is not running."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.layers[0].first.weight[:3]


def test_a_parameter_of_another_unit(two: Pool) -> None:
    two.run(of_another_unit)


def of_another_unit() -> None:
    model, reference = pair(ReadsAnother())
    with pytest.raises(RuntimeError) as caught:
        model(batch())
    assert str(caught.value) == (
        "ReadsAnother: its forward used a parameter that is sharded at that moment, with a plain "
        "tensor: one of another unit (layers.0, layers.1), whose own forward is not "
        "running. Give both modules to one call, fully_shard([a, b]), or call unshard() on the "
        "other before and reshard() after it"
    )
    model.reset_iter_state()
    out = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(batch())
    assert torch.allclose(out, reference(batch()), atol=1e-6), "in a graph what is read is gathered"


class AddsBoth(nn.Module):
    """Its norm yields DTensors, as `SequenceParallel` has it, and its input is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + self.norm(x)


def test_an_activation_that_is_a_dtensor(two: Pool) -> None:
    two.run(an_activation)


def an_activation() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        nn.Sequential(AddsBoth()), mesh["tp"], {"0.norm": SequenceParallel()}
    )
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh["dp"])
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4, 6))
    said = str(caught.value)
    assert said.startswith("0: aten.add.Tensor got mixed torch.Tensor and DTensor")
    assert "an activation that is a DTensor beside one that is plain" in said
    assert "used a parameter of another unit" in said


class ReadsItsState(nn.Linear):
    """A state dict holds sharded parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.state_dict()["weight"].sum()


def test_a_parameter_of_a_state_dict(two: Pool) -> None:
    two.run(of_a_state_dict)


def of_a_state_dict() -> None:
    model = fully_shard(ReadsItsState(6, 6))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 6))
    assert str(caught.value) == (
        "ReadsItsState: its forward used a parameter that is sharded at that moment, with a plain "
        "tensor: no other unit has any, so it is one that state_dict() gave, or that was kept from "
        "before the call. Read the module's attributes inside forward, or call full_tensor() on it"
    )


def test_parameters_on_another_device() -> None:
    param = SimpleNamespace(fqn="0.weight", local=torch.ones(2))
    info = SimpleNamespace(device=torch.device("cuda"))
    unit: Any = SimpleNamespace(
        name="0", params=[param], mesh_info=info, rests_on="cuda", offload=None
    )
    with pytest.raises(RuntimeError) as caught:
        check_devices([unit])
    assert str(caught.value) == (
        "0: parameters 0.weight are not on cuda, where their mesh is, so they cannot be "
        "gathered. Move the whole sharded model with .to('cuda')"
    )
    unit.mesh_info.device, unit.rests_on = torch.device("cpu"), "cpu"
    check_devices([unit])


def order_of_units(api: Api) -> None:
    """Collectives follow the order of units, which must not be that of a set: addresses differ
    between ranks.
    """
    model, _ = pair(Net())
    tree = model._get_fsdp_state().runtime.tree
    tree.members = sorted(tree.members, key=lambda runtime: -runtime.unit.number)
    assert [runtime.unit.name for runtime in tree.in_order()] == [
        "layers.0",
        "layers.1",
        "Net",
    ]


test_order_of_units = both(order_of_units)


def shared_under_other_settings(api: Api) -> None:
    model = Tied()
    fully_shard(model.embed)
    with pytest.warns(
        UserWarning,
        match=r"weight is shared with an earlier call, whose mesh, placement and mp_policy",
    ):
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


test_shared_under_other_settings = both(shared_under_other_settings)


# -- the default backend

BY_INDUCTOR = {
    "checkpointing": (checkpointing, not_reentrant),
    "selective checkpointing": (checkpointing, selective),
    "tied over units": (tied, ("head",)),
    "growing inputs": (growing_inputs,),
}


@pytest.mark.parametrize("case", BY_INDUCTOR)
def test_with_inductor(two: Pool, case: str) -> None:
    two.run(by_inductor, *BY_INDUCTOR[case], timeout=SLOW)


def by_inductor(observe: Any, *args: Any) -> None:
    each(observe, *args, kinds=("inductor",))
