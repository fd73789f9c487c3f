"""Chapter 17: what torch 2.15 adds. On older torch, where it is an addition of ours, compiled is
compared with eager.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal, plain
from kit.extensions import Quantised, Wrapped, two_layers
from kit.oracle import (
    Api,
    against_stock,
    batch,
    each,
    eager_same,
    grads,
    is_sharded,
    mesh_of,
    message,
    net,
    net_of_units,
    ours_alike,
    ours_eager,
    params,
    raised,
    rows,
    same,
    train_step,
)
from kit.pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as StockFSDPModule

import compiled_fsdp
from compiled_fsdp.units import extension

HAS_STOCK = hasattr(StockFSDPModule, "finalize_backward")


def alike(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function: as `same`; where stock has nothing of the kind, ours compiled against ours
    eager.
    """
    (same if HAS_STOCK else ours_alike)(observe, *args)


def eager_alike(observe: Callable[..., Any]) -> None:
    """Worker function: only ours eager, against stock where it has this; the observation asserts by
    itself.
    """
    if HAS_STOCK:
        eager_same(observe)
    else:
        each(observe, kinds=("eager",))


class Scaled(nn.Module):
    """A layer and a scale that is better not rounded; beside them something that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, 6).view(1, 6))
        self.shift = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).to(self.scale.dtype) * self.scale + self.shift.to(self.scale.dtype)


def but_scales(
    dtype: torch.dtype, asked: list[Any]
) -> Callable[[nn.Parameter], torch.dtype | None]:
    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append((tuple(parameter.shape), parameter.dtype))
        if parameter.shape[0] == 1:
            return parameter.dtype
        return dtype if parameter.requires_grad else None

    return override


@rows("17.1")
def test_reduce_dtype_by_default(two: Pool) -> None:
    two.run(same, reduce_dtype_by_default, None)
    two.run(same, reduce_dtype_by_default, torch.bfloat16)


def reduce_dtype_by_default(api: Api, reduce_dtype: torch.dtype | None) -> Any:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, call = net_of_units(api, mp_policy=policy)
    train_step(call)
    once = plain(grads(model))
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    train_step(call, 1)
    train_step(call, 2)
    model.set_requires_gradient_sync(True)
    train_step(call, 3)
    return once, grads(model)


@rows("17.2", "17.3")
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_dtype_of_one_parameter(two: Pool, reduce_dtype: torch.dtype | None) -> None:
    two.run(alike, dtype_of_one_parameter, reduce_dtype)


def dtype_of_one_parameter(api: Api, reduce_dtype: torch.dtype | None) -> Any:
    asked: list[Any] = []
    torch.manual_seed(3)
    policy = api.MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype, param_dtype_override_fn=but_scales(torch.bfloat16, asked)
    )
    model = nn.Sequential(Scaled(), Scaled())
    for module in (*model, model):
        api.fully_shard(module, mp_policy=policy)
    call = api.compile(model)
    seen: list[Any] = []
    for step in range(2):
        out = call(batch(step=step))
        out.float().square().mean().backward()
        seen.append([out.dtype, plain(out)])
    model.set_requires_gradient_sync(False)
    train_step(call, 2)
    model.set_requires_gradient_sync(True)
    train_step(call, 3)
    model[0].unshard()
    full = {name: p.dtype for name, p in model[0].named_parameters()}
    model[0].reshard()
    return sorted(asked, key=str), seen, full, grads(model), params(model)


def test_the_override_leaves_scales_alone(two: Pool) -> None:
    """What the row compares is what it is meant to be."""
    two.run(ours_eager, scales_are_left_alone)


def scales_are_left_alone(api: Api) -> None:
    _, seen, full, found, _ = dtype_of_one_parameter(api, None)
    assert [dtype for dtype, _ in seen] == [torch.float32] * 2
    low = torch.bfloat16
    assert full == {"scale": torch.float32, "shift": low, "layer.weight": low, "layer.bias": low}
    assert [name for name, grad in found.items() if grad is None] == ["0.shift", "1.shift"]


@rows("17.4")
def test_bad_overrides(two: Pool) -> None:
    two.run(alike, bad_overrides)


def bad_overrides(api: Api) -> Any:
    found = []
    for answer in (torch.float16, "bfloat16", torch.bfloat16, torch.float32, None):
        policy = api.MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda _, answer=answer: answer
        )
        found.append(raised(lambda policy=policy: api.fully_shard(net(), mp_policy=policy)))
    return found


@pytest.mark.usefixtures("fake_world")
def test_bad_overrides_name_the_parameter() -> None:
    policy = compiled_fsdp.MixedPrecisionPolicy(
        torch.bfloat16, param_dtype_override_fn=lambda _: torch.float16
    )
    text = message(lambda: compiled_fsdp.fully_shard(net(), mp_policy=policy))
    assert text == (
        "fully_shard: mp_policy.param_dtype_override_fn returned dtype torch.float16 for parameter "
        "0.weight, whose own dtype is torch.float32; should return None, that dtype, or "
        "param_dtype=torch.bfloat16"
    )


@rows("17.11")
@pytest.mark.parametrize("of", ["all", "biases", "set after", "set to its own"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids="/".join)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_grad_dtype(
    two: Pool, of: str, dtypes: tuple[str, str], reduce_dtype: torch.dtype | None
) -> None:
    two.run(alike, grad_dtype_kept, of, dtypes, reduce_dtype)


def grad_dtype_kept(
    api: Api, of: str, dtypes: tuple[str, str], reduce_dtype: torch.dtype | None
) -> Any:
    """Over steps with momentum, the second of three backwards of which one reduces."""
    own, kept = (getattr(torch, name) for name in dtypes)
    model = net().to(own)
    for name, parameter in model.named_parameters():
        if of == "set to its own":
            parameter.grad_dtype = own
        elif of == "all" or (of == "biases" and name.endswith("bias")):
            parameter.grad_dtype = kept
    policy = api.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = api.units(model, "0", "2", mp_policy=policy)
    if of == "set after":
        for parameter in model.parameters():
            parameter.grad_dtype = kept
    call, seen = api.compile(model), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro in range(3 if step == 1 else 1):
            model.set_requires_gradient_sync(step != 1 or micro == 2)
            call(batch(step=10 * step + micro).to(own)).float().square().mean().backward()
        seen.append({name: [p.grad_dtype, plain(p.grad)] for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    wanted = {own, kept} if of == "biases" else {own} if of == "set to its own" else {kept}
    assert {dtype for dtype, _ in seen[0].values()} == wanted
    return seen, params(model)


@rows("17.11")
def test_grad_dtype_outlives_what_is_done_to_parameters(two: Pool) -> None:
    two.run(alike, grad_dtype_outlives)


def grad_dtype_outlives(api: Api) -> Any:
    model = net().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    model = api.units(model, "0", "2")
    model.to(torch.float16)
    call = api.compile(model)
    seen = []
    for step in range(2):
        call(batch(step=step).half()).float().square().mean().backward()
        seen.append(plain(grads(model)))
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.zero_grad()
        model.load_state_dict(state, assign=True)
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}
    for parameter in model.parameters():
        parameter.grad = parameter.detach().float().fill_(1e6)  # infinite in float16
    model.to(torch.float64).to(torch.float16)
    return seen, params(model), grads(model)


def test_gradients_are_added_in_grad_dtype(two: Pool) -> None:
    """256 + 1 - 256 is 0 in bf16."""
    two.run(each, added_in_grad_dtype)


def added_in_grad_dtype(api: Api) -> None:
    for reduces in (True, False):
        layer = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
        layer.weight.grad_dtype = torch.float32
        api.fully_shard(layer)
        call = api.compile(layer)
        for value in (256.0, 1.0, -256.0):
            layer.set_requires_gradient_sync(reduces or value < 0)
            call(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad.full_tensor().tolist() == [[1.0], [1.0]], reduces


@pytest.mark.usefixtures("fake_world")
def test_grad_dtype_that_is_refused() -> None:
    """None, of which no flat gradient can be made; of a part of one that was made without."""
    model = net()
    model[2].weight.grad_dtype = None
    assert message(lambda: compiled_fsdp.fully_shard(model)) == (
        "fully_shard: parameter 2.weight of torch.float32 has grad_dtype=None, which is not "
        "supported: its gradient is a part of a flat one, reduced over the ranks. Set it to a "
        "floating-point dtype of two bytes or more, torch.float32 say, or leave it as it is"
    )
    model = compiled_fsdp.fully_shard(net())
    model[2].weight.grad_dtype = torch.float64
    told = message(lambda: model(torch.ones(1, 6)))
    assert told.startswith(
        "Sequential: grad_dtype of its sharded parameters of torch.float32 was set on some, or to "
        "different dtypes (0.weight: None, 0.bias: None, 2.weight: torch.float64, "
    )


@rows("17.5", status="eager")
def test_kept_storage(two: Pool) -> None:
    two.run(eager_alike, kept_storage)


def kept_storage(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_keep_unsharded_storage(True)
    model[2].set_keep_unsharded_storage(False, recurse=False)
    train_step(model)
    seen: list[Any] = [is_sharded(model)]
    for module in (model[0], model[2]):
        module.unshard()
        full = module.weight
        address, values = full.data_ptr(), plain(full)
        module.reshard()
        seen.append([full.untyped_storage().size() > 0, is_sharded(module)])
        with torch.no_grad():
            module.weight.mul_(2)
        module.unshard()
        seen.append(
            [
                module.weight.data_ptr() == address or module is model[2],
                values,
                plain(module.weight),
            ]
        )
        module.reshard()
    model.set_keep_unsharded_storage(False)
    model[0].unshard()
    full = model[0].weight
    model[0].reshard()
    assert full.untyped_storage().size() == 0
    assert seen[1] == [True, [True, True]]
    return seen, train_step(model), grads(model)


@rows("17.5")
def test_kept_storage_computes_the_same(two: Pool) -> None:
    two.run(alike, with_kept_storage)


def with_kept_storage(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_keep_unsharded_storage(True)
    call = api.compile(model)
    losses = []
    for step in range(3):
        losses.append(train_step(call, step))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
        model.zero_grad()
    return losses, params(model)


@rows("17.6")
def test_manual_finalization(two: Pool) -> None:
    two.run(alike, manual_finalization)


def manual_finalization(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_manual_backward_finalization(True)
    seen: list[Any] = [model.finalize_backward()]
    call = api.compile(model)
    for step in range(2):
        train_step(call, step)
        seen += [model.finalize_backward(), plain(grads(model)), is_sharded(model)]
    train_step(call, 2)
    train_step(call, 3)
    seen.append(model.finalize_backward())
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    train_step(call, 4)
    return seen, grads(model), is_sharded(model)


@rows("17.6", status="eager")
def test_what_waits_for_finalization(two: Pool) -> None:
    two.run(eager_alike, what_waits)


def what_waits(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_manual_backward_finalization(True)
    train_step(model)
    before = (
        [is_sharded(model[i]) for i in (0, 2, 4)],
        {i: model[i].weight.grad is None for i in (0, 4)},
    )
    model.finalize_backward()
    after = is_sharded(model), [p.grad is None for p in model.parameters()]
    assert after == ([True] * 6, [False] * 6)
    return before, after


@rows("17.7")
def test_several_backwards_before_one_finalization(two: Pool) -> None:
    two.run(alike, several_backwards)


def several_backwards(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_manual_backward_finalization(True)
    call = api.compile(model)
    seen = []
    for has_synced in (False, True):
        model.set_requires_gradient_sync(False)
        for step in range(2):
            train_step(call, step)
        model.set_requires_gradient_sync(True)
        if has_synced:
            train_step(call, 2)
        model.finalize_backward()
        seen.append(plain(grads(model)))
        model.zero_grad()
    return seen, is_sharded(model)


def test_several_backwards_are_added(two: Pool) -> None:
    """Against autograd's own end: the same backwards, of which the last one reduces."""
    two.run(each, backwards_are_added)


def backwards_are_added(api: Api) -> None:
    found = several_backwards(api)[0]
    model, call = net_of_units(api)
    model.set_requires_gradient_sync(False)
    train_step(call, 0)
    model.set_requires_gradient_sync(True)
    train_step(call, 1)
    check_equal(found[0], plain(grads(model)), "finalized by hand", 1e-6, 1e-7)


@rows("17.8")
def test_finalization_in_the_background(two: Pool) -> None:
    two.run(alike, in_the_background)


def in_the_background(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_manual_backward_finalization(True)
    handle = model.finalize_backward(async_op=True)
    seen: list[Any] = [isinstance(handle, api.GradientReductionHandle), handle.wait()]
    call = api.compile(model)
    train_step(call)
    handle = model.finalize_backward(async_op=True)
    seen += [isinstance(handle, api.GradientReductionHandle), is_sharded(model)]
    seen += [raised(lambda: call(batch())), raised(model.finalize_backward)]
    seen += [handle.wait(), handle.wait(), plain(grads(model))]
    train_step(call, 1)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    seen.append(raised(handle.wait))
    model.zero_grad()
    train_step(call, 2)
    model.finalize_backward()
    return seen, grads(model)


@rows("17.9", status="eager")
def test_misused_finalization(two: Pool) -> None:
    two.run(eager_alike, misused)


def misused(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    inside: list[Any] = []

    def hook(grad: Tensor) -> None:
        inside.append(raised(model.finalize_backward))
        inside.append(raised(lambda: model.set_manual_backward_finalization(False)))

    train_step(model)
    seen: list[Any] = [
        raised(model.finalize_backward),
        raised(lambda: model[0].set_manual_backward_finalization(True)),
    ]
    model.set_manual_backward_finalization(True)
    out = model(batch(step=1))
    out.register_hook(hook)
    out.square().mean().backward()
    seen.append(raised(lambda: model.set_manual_backward_finalization(False)))
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    late = net()
    api.fully_shard(late[0]).set_manual_backward_finalization(True)
    api.fully_shard(late)
    seen.append(raised(lambda: late(batch())))
    assert seen == ["RuntimeError"] * 4
    assert inside == ["RuntimeError"] * 2
    return seen, inside, grads(model)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_before_finalization_is_announced(two: Pool, is_async: bool) -> None:
    """In a graph nothing waits for it."""
    two.run(each, step_too_early, is_async)


def step_too_early(api: Api, is_async: bool) -> None:
    model = api.units(net(), "0", "2")
    call = api.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_manual_backward_finalization(True)
    train_step(call)
    handle = model.finalize_backward(async_op=True) if is_async else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    texts = [
        str(w.message) for w in said if "SGD.step() before the backward of Seq" in str(w.message)
    ]
    assert bool(texts) is not api.is_compiled or dist.get_rank() > 0
    if handle is None:
        model.finalize_backward()
    else:
        handle.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@rows("17.6")
def test_roots_that_share_their_communications(two: Pool) -> None:
    two.run(alike, roots_that_share)


def roots_that_share(api: Api) -> Any:
    """As the stages of a pipeline: each is finalized by itself, and a third by autograd."""
    parts = [api.fully_shard(net(seed=seed)) for seed in (1, 2, 3)]
    api.share_comm_ctx(parts)
    for part in parts[:2]:
        part.set_manual_backward_finalization(True)
    calls = [api.compile(part) for part in parts]
    seen: list[Any] = []
    for step, call in enumerate(calls):
        train_step(call, step)
    seen.append(plain(grads(parts[2])))
    for part in parts[:2]:
        handle = part.finalize_backward(async_op=True)
        seen.append([raised(lambda call=call: call(batch())) for call in calls])
        handle.wait()
        seen.append(plain(grads(part)))
        part.set_manual_backward_finalization(False)
    return seen, [train_step(call, 5) for call in calls], [grads(part) for part in parts]


@rows("17.10")
def test_no_finalization_of_what_is_not_all_reduced(four: Pool) -> None:
    four.run(alike, not_all_reduced)


def not_all_reduced(api: Api) -> Any:
    model = api.units(net(), "0", "2", mesh=mesh_of(2, 2, names=("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    call = api.compile(model)
    model.set_requires_all_reduce(False)
    train_step(call)
    seen = [raised(model.finalize_backward)]
    model.set_requires_all_reduce(True)
    train_step(call, 1)
    return seen, raised(model.finalize_backward)


@rows("17.13")
def test_reset_forgets_gradients(two: Pool) -> None:
    against_stock(two, same, reset_forgets_gradients, "reset_iter_state")


def reset_forgets_gradients(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(api.compile(model))
    before = [p.grad is None for p in model.parameters()]
    model.reset_iter_state()
    return before, grads(model)


class Released(Quantised):
    """What was gathered is not needed once the full parameter is built."""

    answer: Any = True
    outputs: list[Tensor] = []  # noqa: RUF012

    def fsdp_post_all_gather(self, outputs: Any, *rest: Any, **options: Any) -> Any:
        Released.outputs = [*outputs]
        return super().fsdp_post_all_gather(outputs, *rest, **options)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer


@rows("17.14", status="eager")
def test_released_outputs(two: Pool) -> None:
    two.run(eager_alike, released_outputs)


def released_outputs(api: Api) -> Any:
    model = two_layers(Released)
    for layer in (model[0], model[2], model):
        api.fully_shard(layer)
    seen: list[Any] = []
    for step in range(2):
        train_step(model, step)
        model[0].unshard()
        seen.append([output.untyped_storage().size() for output in Released.outputs])
        seen.append(plain(model[0].weight))
        model[0].reshard()
    assert seen[0] == seen[2] == [0, 0]
    return seen, grads(model)


@rows("17.14")
def test_bad_answers_about_releasing(two: Pool) -> None:
    two.run(bad_answers)


def bad_answers() -> None:
    model = two_layers(type("Unsure", (Released,), {"answer": 1}))
    assert raised(lambda: compiled_fsdp.fully_shard(model)(batch())) == "AssertionError"
    alone = type("Alone", (Wrapped,), {extension.RELEASE: lambda _: True})
    assert "and neither fsdp_pre_all_gather nor" in message(
        lambda: compiled_fsdp.fully_shard(two_layers(alone))
    )
