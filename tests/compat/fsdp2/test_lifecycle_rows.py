"""Chapters 6, 6b, 7 and 8: hooks, grouped modules, resharding, prefetching."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kit.compare import plain, whole
from kit.harness import SLOW
from kit.oracle import (
    Api,
    batch,
    close,
    communications,
    each,
    eager_same,
    grads,
    inductor_same,
    input_step,
    is_sharded,
    net,
    net_of_units,
    params,
    raised,
    rows,
    same,
    train_step,
    unless_stock_raises,
)
from kit.pool import Pool
from torch import Tensor, nn

from compiled_fsdp import errors

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    """An input that is a dataclass."""

    x: Tensor
    name: str = "batch"


@dataclass
class Sealed:
    """A dataclass that `dataclasses.replace` cannot copy."""

    x: Tensor = field(init=False)


class Probe(nn.Linear):
    """Notes what its forward sees."""

    def __init__(self) -> None:
        super().__init__(6, 5)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            is_parameter = (
                type(self.weight) is nn.Parameter and self.weight is self._parameters["weight"]
            )
            self.seen.append(
                [is_parameter, tuple(self.weight.shape), x.dtype, x.grad_fn is not None, x.detach()]
            )
        return super().forward(x) * self.weight.shape[0]


@rows("6.1", "6.12", "6.13", "6.16", "6.18", status="eager")
def test_what_hooks_and_forward_see(two: Pool) -> None:
    two.run(eager_same, what_hooks_and_forward_see)


def what_hooks_and_forward_see(api: Api) -> Any:
    torch.manual_seed(7)
    model, seen = Probe(), []

    def note(m: nn.Module, args: Any, out: Any = None) -> None:
        seen.append([is_sharded(m), args[0].dtype, None if out is None else out.dtype])

    model.register_forward_pre_hook(note)
    model.register_forward_hook(note)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    api.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    counts = len(model._forward_pre_hooks), len(model._forward_hooks)
    model.register_forward_pre_hook(note)
    model.register_forward_hook(note)
    x = batch(requires_grad=True)
    model(x).sum().backward()
    return counts, seen, model.seen, x.grad


@rows("6.13")
def test_full_shape_in_forward(two: Pool) -> None:
    two.run(same, full_shape_in_forward)


def full_shape_in_forward(api: Api) -> Any:
    torch.manual_seed(7)
    model = api.fully_shard(Probe())
    return input_step(api.compile(model)), grads(model)


@rows("6.4", "6.9")
def test_forward_of_a_part(two: Pool) -> None:
    two.run(same, forward_of_a_part)


def forward_of_a_part(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(api.compile(model))
    call = api.compile(model[0])
    call(batch(step=1)).sum().backward()
    return is_sharded(model), plain(grads(model)), train_step(api.compile(model), 2), grads(model)


@rows("6.5", status="improved")
def test_any_order_of_first_forwards(two: Pool) -> None:
    """Stock raises, and after that takes the failed state for initialised."""
    two.run(each, any_order_of_first_forwards)


def any_order_of_first_forwards(api: Api) -> None:
    model = api.units(net(), "0", "2")
    api.compile(model[0])(batch()).sum().backward()
    model.zero_grad()
    train_step(api.compile(model), 1)
    straight = api.units(net(), "0", "2")
    train_step(api.compile(straight), 1)
    pairs = zip(model.parameters(), straight.parameters(), strict=True)
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)
    grouped = net()
    api.fully_shard([grouped[0], grouped[2]])
    api.compile(grouped[0])(batch()).sum().backward()
    assert grouped[0].weight.grad is not None


@rows("6.8")
def test_disjoint_trees(two: Pool) -> None:
    two.run(same, disjoint_trees)


def disjoint_trees(api: Api) -> Any:
    model = net()
    for name in "024":
        api.fully_shard(model.get_submodule(name))
    call = api.compile(model)
    losses = [train_step(call, step) for step in (0, 1)]
    return losses, is_sharded(model), grads(model)


class Boxed(nn.Module):
    """Takes its tensor out of a container and returns the result in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(6, 5)

    def forward(self, box: Any) -> Any:
        get = (
            box.x
            if isinstance(box, Pair | Batch)
            else box["x"][0]
            if isinstance(box, dict)
            else box[0]
        )
        return {"out": [self.inner(get).tanh()], "n": 1}


@rows("6.14", "6.16")
def test_containers(two: Pool) -> None:
    two.run(same, containers, "dict", "dataclass")
    two.run(eager_same, containers, "list", "tuple", "namedtuple")


WRAPS: dict[str, Any] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 1),
    "dict": lambda x: {"x": [x]},
    "namedtuple": lambda x: Pair(x, None),
    "dataclass": Batch,
}


def containers(api: Api, *kinds: str) -> Any:
    seen = []
    for wrap in map(WRAPS.__getitem__, kinds):
        model = api.units(Boxed(), "inner")
        x = batch(requires_grad=True)
        box = wrap(x)
        counts = communications(lambda m=model, b=box: api.compile(m)(b)["out"][0].sum().backward())
        seen.append([counts["reduce"], x.grad, is_sharded(model), grads(model)])
    return seen


@rows("6.14", "6.16", status="improved")
def test_inputs_that_stock_refuses(two: Pool) -> None:
    """Not copyable, or 128 levels deep: ours reduces at the end of backward where it cannot watch
    an input.
    """
    two.run(inputs_that_stock_refuses)


def inputs_that_stock_refuses() -> None:
    for kind in ("stock", "eager"):
        api, sealed, deep = Api(kind), Sealed(), batch(requires_grad=True)
        sealed.x = batch(requires_grad=True)
        for _ in range(130):
            deep = [deep]
        for refused in (sealed, deep):
            model = api.fully_shard(Boxed())
            is_refused = (
                raised(lambda m=model, r=refused: m([batch(), r])["out"][0].sum().backward())
                is not None
            )
            if api.is_stock and not is_refused:
                continue  # torch 2.11: it looks into no object and to no depth
            assert is_refused == api.is_stock
            assert (model.inner.weight.grad is None) == api.is_stock


@rows("6.15", "6.21", "6.22", "6.23", "6.24")
def test_backward(two: Pool) -> None:
    two.run(same, backward)


def backward(api: Api) -> Any:
    model, call = net_of_units(api)
    seen = [[train_step(call), is_sharded(model), plain(grads(model))]]
    for step in (1, 2):
        counts = communications(lambda step=step: input_step(call, step))
        seen.append([counts, is_sharded(model), plain(grads(model))])
    return seen


class ViewedLinear(nn.Linear):
    """Returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:]


class Viewed(nn.Module):
    """Units that return views, which are written to in place where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ViewedLinear(6, 6) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(-1, 2, 3).mul_(0.5).flatten(1)
        return x[:, :4]


@rows("6.19", status="improved")
def test_views_written_to(two: Pool) -> None:
    """Outputs that are views may be written to in place, and gradients are right: nothing has to be
    announced. Stock warns at every forward, and fails where backward needs what it has freed.
    """
    two.run(views_written_to)


def views_written_to() -> None:
    found = {}
    for kind in ("unsharded", "stock", "eager", "compiled"):
        errors._said.clear()
        torch.manual_seed(0)
        api, model = Api(kind), Viewed()
        if kind != "unsharded":
            api.units(model, "layers.0", "layers.1", "layers.2")
        call = api.compile(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                out = call(torch.ones(4, 6) + step)
                out.mul_(0.5)
                error = raised(out.square().sum().backward)
        assert (error is not None) == api.is_stock
        assert api.is_stock or not any("view" in str(w.message) for w in caught)
        found[kind] = [whole(p.grad) for p in model.parameters() if not api.is_stock]
    for kind in ("eager", "compiled"):
        for grad, expected in zip(found[kind], found["unsharded"], strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)  # sums over two ranks


class Passing(nn.Linear):
    """Returns a part of what it was given, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x[:, :1]


class PassedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Passing(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))[0]
        return y


def test_a_view_of_an_input_gathers_nothing(two: Pool) -> None:
    """Backward comes to what the input was computed with when the unit is done."""
    two.run(eager_same, view_of_an_input)


def view_of_an_input(api: Api) -> Any:
    model = api.units(PassedOn(), "first", "second")
    train_step(model)
    return communications(lambda: train_step(model, 1))


@rows("6.25")
def test_gradient_hooks(two: Pool) -> None:
    two.run(same, gradient_hooks)


def gradient_hooks(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    called: list[str] = []
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: called.append(f"tensor {name}"))

        def update(p: Any, name: str = name) -> None:
            called.append(name)
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
    call = api.compile(model)
    losses = [train_step(call, step) for step in range(3)]
    return losses, sorted(called), params(model), grads(model)


class Hooking(nn.Linear):
    """Its first forward registers a hook that doubles what its weight gets."""

    handle: Any = None

    def forward(self, x: Any) -> Any:
        if self.handle is None:
            self.handle = self.weight.register_hook(lambda grad: grad * 2)
        return super().forward(x) + self.weight.sum()


@pytest.mark.parametrize("is_in_forward", [True, False])
@rows("6.25")
def test_hooks_on_full_parameters(two: Pool, is_in_forward: bool) -> None:
    two.run(same, hooks_on_full_parameters, is_in_forward)


def hooks_on_full_parameters(api: Api, is_in_forward: bool) -> Any:
    """Of a forward, or after `unshard()`: they are called in every step until they are removed. A
    compiled unit runs eagerly for them.
    """
    model = net()
    model[2] = (Hooking if is_in_forward else nn.Linear)(7, 7)
    api.units(model, "2")
    if not is_in_forward:
        model[2].unshard()
        model[2].handle = model[2].weight.register_hook(lambda grad: grad * 2)
        model[2].reshard()
    found = []
    call = api.compile(model, fullgraph=False)
    for step in range(4):
        if step == 3:
            model[2].handle.remove()
        found.append([train_step(call, step), grads(model)])
        model.zero_grad()
    return found


@rows("6.26")
def test_gradient_that_is_no_dtensor(two: Pool) -> None:
    two.run(same, gradient_that_is_no_dtensor)


def gradient_that_is_no_dtensor(api: Api) -> Any:
    model = api.fully_shard(net())
    model[0].weight.grad = torch.zeros(7, 6)
    return raised(lambda: train_step(api.compile(model)))


STOCK_RANGES = (
    "pre_forward",
    "all_gather",
    "all_gather_copy_out",
    "post_forward",
    "pre_backward",
    "post_backward_reduce",
    "root_post_backward_callback",
)


@rows("6.30", status="eager")
def test_profiler_ranges(two: Pool) -> None:
    two.run(eager_same, profiler_ranges)


def profiler_ranges(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(model)
    with torch.profiler.profile() as profiler:
        train_step(model)
    found = [e.name for e in profiler.events() if e.name.startswith("FSDP::") and "(" in e.name]
    return sorted(
        {
            n
            for n in found
            if n.removeprefix("FSDP::").split(" (")[0] in STOCK_RANGES and "Sequential" not in n
        }
    )


class Grouped(nn.Module):
    """A body, and a head whose two members form one unit with the norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body, self.norm, self.head = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        x = self.norm(self.body(x).tanh())
        return x if skip_head else self.head(x)


def grouped(api: Api, **options: Any) -> Any:
    model = Grouped()
    api.fully_shard([model.norm, model.head], **options)
    return api.fully_shard(model, reshard_after_forward=True)


@rows("6b.1", "6b.3", "6b.4")
def test_group(two: Pool) -> None:
    two.run(same, group)
    two.run(eager_same, group_registration)


def group(api: Api) -> Any:
    model = grouped(api)
    call = api.compile(model)
    input_step(call)
    seen = [communications(lambda: input_step(call, 1)), plain(grads(model))]
    x = batch(requires_grad=True)
    call(x, skip_head=True).sum().backward()
    return seen, x.grad, is_sharded(model), plain(grads(model)), input_step(call, 2), grads(model)


def group_registration(api: Api) -> Any:
    model, seen = grouped(api), []
    for module in (model.body, model.norm, model.head):
        module.register_forward_hook(
            lambda *args: seen.append([is_sharded(m) for m in (model.norm, model.head)])
        )
    model(batch())
    return seen, is_sharded(model)


@rows("6b.2")
def test_casts_of_a_group(two: Pool) -> None:
    unless_stock_raises(two, casts_of_a_group, "mixed dtype (CPU)")


def casts_of_a_group(api: Api) -> Any:
    model = grouped(
        api,
        mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
    )
    call = api.compile(model)
    with torch.no_grad():
        outs = [call(batch()), call(batch(), skip_head=True)]
    return outs, input_step(call), grads(model)


@rows("6b.5")
def test_chunked_loss(two: Pool) -> None:
    unless_stock_raises(two, chunked_loss, "its data is not allocated yet")


def chunked_loss(api: Api) -> Any:
    model = grouped(api)
    call, head = api.compile(model), api.compile(model.head)
    for step in range(2):
        hidden = call(batch(step=step), skip_head=True)
        apart = hidden.detach().requires_grad_()
        for chunk in apart.chunk(2):
            head(chunk).square().mean().backward()
        hidden.backward(apart.grad)
    return is_sharded(model), plain(grads(model)), input_step(call, 2)


@rows("7.1", "7.2", "7.3", "7.4")
def test_reshard_after_forward(two: Pool) -> None:
    for value in (True, False, None):
        two.run(same, reshard_counts, value)
        two.run(eager_same, reshard_registration, value)


def test_reshard_counts_with_inductor(two: Pool) -> None:
    two.run(inductor_same, reshard_counts, False, timeout=SLOW)


def reshard_counts(api: Api, value: Any) -> Any:
    model, call = net_of_units(api, reshard_after_forward=value)
    input_step(call)
    counts = communications(lambda: input_step(call, 1))
    return counts, is_sharded(model), grads(model)


def reshard_registration(api: Api, value: Any) -> Any:
    model = api.units(net(), "0", "2", reshard_after_forward=value)
    model[0].unshard()
    full = (
        [p.untyped_storage().size() > 0 for p in model[0].parameters()],
        list(model[0].parameters()),
    )
    out = model(batch())
    after = is_sharded(model), [p.untyped_storage().size() > 0 for p in full[1]]
    out.sum().backward()
    return full[0], after, is_sharded(model), [p.untyped_storage().size() > 0 for p in full[1]]


@rows("7.5")
def test_int_reshard(four: Pool) -> None:
    four.run(close, int_reshard)


def test_int_reshard_with_inductor(four: Pool) -> None:
    four.run(inductor_same, int_reshard, timeout=SLOW)


def int_reshard(api: Api) -> Any:
    model, call = net_of_units(api, reshard_after_forward=2)
    inputs = [input_step(call, step) for step in (0, 1)]
    return inputs, is_sharded(model), grads(model), params(model)


@rows("1.18", "7.5", status="improved")
def test_int_reshard_registers_the_sharded_parameter(four: Pool) -> None:
    """Not a DTensor on the k-mesh that must not be touched: what the user finds is always his own
    parameter.
    """
    four.run(each, int_reshard_registration)


def int_reshard_registration(api: Api) -> None:
    model = api.units(net(), "0", "2", reshard_after_forward=2)
    own = list(model.parameters())
    api.compile(model)(batch())
    model.reshard()
    assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
    assert {p.device_mesh.ndim for p in model.parameters()} == {1}


@rows("7.8")
def test_modified_before_backward(two: Pool) -> None:
    two.run(same, modified_before_backward)


def modified_before_backward(api: Api) -> Any:
    model = api.units(net(), "0", "2", reshard_after_forward=True)
    x = batch(requires_grad=True)
    loss = api.compile(model)(x).square().mean()
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(3.0)
    loss.backward()
    return x.grad, grads(model)


@rows("7.9", status="improved")
def test_no_grad_forward_reshards(two: Pool) -> None:
    """A default root that stays gathered after evaluation would only hold memory."""
    two.run(each, no_grad_forward_reshards)


def no_grad_forward_reshards(api: Api) -> None:
    model = api.units(net(), "0", "2")
    with torch.no_grad():
        api.compile(model)(batch())
    assert all(is_sharded(model))


@rows("7.9")
def test_no_grad_then_training(two: Pool) -> None:
    two.run(same, no_grad_then_training)


def no_grad_then_training(api: Api) -> Any:
    model, call = net_of_units(api)
    with torch.no_grad():
        out = call(batch())
    return out, train_step(call, 1), grads(model), is_sharded(model)


class Weight(nn.Module):
    """A head that computes with the weight of another unit, as lingua's `TiedLinear`."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.of.weight)


@rows("7.2", "7.9")
def test_kept_for_another_unit(two: Pool) -> None:
    two.run(same, kept_for_another_unit)


def kept_for_another_unit(api: Api) -> Any:
    torch.manual_seed(0)
    embed, found = nn.Linear(6, 6, bias=False), []
    model = nn.Sequential(embed, nn.Linear(6, 6), Weight(embed))
    api.fully_shard(model[0], reshard_after_forward=False)
    api.fully_shard(model[2])
    call = api.compile(api.fully_shard(model, reshard_after_forward=True))
    for step in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found.append(call(batch(step=step)).clone())
                if not api.is_stock:
                    assert all(is_sharded(model))
        found.append(train_step(call, step))
        found.append(plain(grads(model)))
    if api.kind == "eager":
        model[1].register_forward_hook(lambda *_: 1 / 0)
        with torch.no_grad():
            assert raised(lambda: model(batch())) == "ZeroDivisionError"
        assert all(is_sharded(model[0]))
    return found


@rows("7.10", status="improved")
def test_update_after_evaluation(two: Pool) -> None:
    """Stock computes with the stale full copy."""
    two.run(update_after_evaluation)


def update_after_evaluation() -> None:
    wanted = evaluate_update_evaluate(Api("eager"), is_resharded=True)
    for kind in ("eager", "compiled"):
        assert torch.equal(evaluate_update_evaluate(Api(kind), is_resharded=False), wanted)
    assert not torch.equal(evaluate_update_evaluate(Api("stock"), is_resharded=False), wanted)


def evaluate_update_evaluate(api: Api, is_resharded: bool) -> Tensor:
    model = api.units(net(), "0", "2")
    own = list(model.parameters())
    call = api.compile(model)
    with torch.no_grad():
        call(batch())
        if is_resharded:
            model.reshard()
        for p in own:
            p.to_local().mul_(2.0)
        return call(batch())


@rows("8.2", "8.3")
def test_backward_gathers_once(two: Pool) -> None:
    two.run(same, backward_gathers_once)


def backward_gathers_once(api: Api) -> Any:
    model = api.units(net(depth=4), "0", "2", "4", "6")
    call = api.compile(model)
    input_step(call)
    return [
        (communications(lambda step=step: input_step(call, step)), plain(grads(model)))
        for step in (1, 2)
    ]


@rows("8.4", "8.5")
def test_prefetch_lists(two: Pool) -> None:
    two.run(same, prefetch_lists)


def prefetch_lists(api: Api) -> Any:
    model = api.units(net(depth=3), "0", "2", "4")
    setters = (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch)
    errors = [raised(lambda s=s: s([model[0], nn.Linear(2, 2)])) for s in setters]
    model[0].set_modules_to_forward_prefetch([model[2], model[4]])
    model[4].set_modules_to_backward_prefetch([model[2], model[0]])
    call = api.compile(model)
    input_step(call)
    return errors, communications(lambda: input_step(call, 1)), grads(model)


@rows("8.4", "8.5", status="eager")
def test_order_of_prefetched_gathers(two: Pool) -> None:
    two.run(eager_same, order_of_prefetched_gathers)


def order_of_prefetched_gathers(api: Api) -> Any:
    model = api.units(net(depth=3), "0", "2", "4")
    input_step(model)
    model.set_modules_to_forward_prefetch([model[0]])
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[0].set_modules_to_forward_prefetch([model[4], model[2]])
    model[2].set_modules_to_forward_prefetch([model[4]])
    model[4].set_modules_to_forward_prefetch([model[4]])
    model[4].set_modules_to_backward_prefetch([model[0], model[2]])
    with torch.profiler.profile() as profiler:
        input_step(model, 1)
    found = sorted(
        (e.time_range.start, e.name)
        for e in profiler.events()
        if e.name.startswith("FSDP::all_gather (")
    )
    return [name for _, name in found if "Sequential" not in name]


@rows("8.7", status="eager")
def test_prefetched_and_not_used(two: Pool) -> None:
    two.run(eager_same, prefetched_and_not_used)


def prefetched_and_not_used(api: Api) -> Any:
    model = api.units(net(depth=3), "0", "2", "4")
    train_step(model)
    model[0].set_modules_to_forward_prefetch([model[4]])
    seen = []
    handle = model[0].register_forward_hook(lambda *args: seen.append(is_sharded(model[4])))
    model[0](batch(step=1)).sum().backward()
    handle.remove()
    return seen, is_sharded(model), train_step(model, 2), grads(model)
