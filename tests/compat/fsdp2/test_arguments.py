"""Chapters 1 and 2 of the specification: arguments of `fully_shard`, and what it makes of the
module.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import plain
from kit.oracle import (
    Api,
    Own,
    ShardPlacementResult,
    batch,
    close,
    close_eager,
    communications,
    each,
    eager_same,
    grads,
    is_sharded,
    mesh_of,
    message,
    net,
    params,
    raised,
    rows,
    same,
    train_step,
    unless_stock_raises,
)
from torch import nn
from torch.distributed._composable import contract
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from kit.pool import Pool


class Chain(nn.ModuleList):
    """A container that can be called."""

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class Odd(Own):
    """With methods that FSDPModule has too."""

    def unshard(self) -> str:
        return "its own"

    def reshard(self) -> str:
        return "its own"


def counted_step(call: Any) -> dict[str, int]:
    """The gathers and reductions of one step; its input requires a gradient, so that backward needs
    every weight.
    """

    def step() -> None:
        call(batch(step=1, requires_grad=True)).square().mean().backward()

    step()
    with torch.profiler.profile() as profiler:
        step()
    names = [e.name for e in profiler.events()]
    gathers = names.count("fsdp::all_gather") + names.count("c10d::_allgather_base_")
    return {
        "gather": gathers,
        "reduce": names.count("c10d::_reduce_scatter_base_") + names.count("fsdp::all_to_all"),
    }


# -- chapter 1


@rows("1.1")
def test_signature_and_result(two: Pool) -> None:
    two.run(same, signature_and_result)


def signature_and_result(api: Api) -> Any:
    of_stock = inspect.signature(
        Api("stock").fully_shard
    ).parameters  # torch 2.11 has no `dp_mesh_dims`
    found = [
        p for name, p in inspect.signature(api.fully_shard).parameters.items() if name in of_stock
    ]
    model, pair, tuple_ = net(), [net(), net()], (net(), net())
    same_object = [
        api.fully_shard(model) is model,
        api.fully_shard(pair) is pair,
        api.fully_shard(tuple_) is tuple_,
    ]
    return (
        [(p.name, str(p.kind), repr(p.default)) for p in found],
        same_object,
        raised(lambda: api.fully_shard(net(), None)),
    )


@rows("1.2", "1.4", "1.5")
def test_modules_that_are_refused(two: Pool) -> None:
    two.run(same, modules_that_are_refused)
    unless_stock_raises(two, container_with_forward, "containers that do not implement forward")


def container_with_forward(api: Api) -> Any:
    return api.compile(api.fully_shard(Chain([net()])))(batch())


def modules_that_are_refused(api: Api) -> Any:
    once, listed = net(), net()
    api.fully_shard(once)
    return (
        raised(lambda: api.fully_shard(nn.ModuleList([net()]))),
        raised(lambda: api.fully_shard(nn.ModuleDict({"a": net()}))),
        [type(m).__name__ for m in api.fully_shard([nn.ModuleList([net()])])],
        raised(lambda: api.fully_shard([])),
        raised(lambda: api.fully_shard(once)),
        raised(lambda: api.fully_shard([listed, listed])),
    )


@rows("1.3")
def test_list_of_modules(two: Pool) -> None:
    two.run(same, list_of_modules)


def list_of_modules(api: Api) -> Any:
    model = net(depth=3)
    inner = model[2]
    model[2] = nn.Sequential(inner)
    api.fully_shard([model[0], model[4], model[2], inner])
    states = [api.fully_shard.state(model[i]) for i in (0, 2, 4)]
    is_shared = [a is b for a in states for b in states]
    api.fully_shard(model)
    counts = counted_step(model)
    return (
        [type(m).__name__ for m in model.modules()],
        is_shared,
        is_sharded(model),
        counts,
        grads(model),
    )


@rows("1.7", status="improved")
def test_second_try(two: Pool) -> None:
    """A call that was refused leaves nothing behind; after stock's the module counts as sharded."""
    two.run(each, second_try)


def second_try(api: Api) -> None:
    ours, theirs = net(), net()
    assert raised(lambda: api.fully_shard(ours, reshard_after_forward="x")) == "ValueError"
    assert (
        raised(lambda: Api("stock").fully_shard(theirs, reshard_after_forward="x")) == "ValueError"
    )
    assert raised(lambda: Api("stock").fully_shard(theirs)) == "AssertionError"
    assert not any(is_sharded(ours))
    assert all(is_sharded(api.fully_shard(ours)))


@rows("1.8", "1.9")
def test_default_mesh(two: Pool) -> None:
    two.run(same, default_mesh)


def default_mesh(api: Api) -> Any:
    first = api.fully_shard(net())
    calls: list[Any] = []

    def init(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    where = (dist, dist.distributed_c10d)
    with contextlib.ExitStack() as stack:
        for module in where:
            stack.enter_context(mock.patch.object(module, "is_initialized", new=calls.__len__))
            stack.enter_context(mock.patch.object(module, "init_process_group", init))
        second = api.fully_shard(net())
    meshes = [model[0].weight.device_mesh for model in (first, second)]
    return calls, [
        (m.device_type, m.mesh, m.mesh_dim_names, len(m.get_group().group_name) > 0) for m in meshes
    ]


@rows("1.10", "1.11", "1.13", "1.14")
def test_meshes_and_sizes_that_are_refused(four: Pool) -> None:
    four.run(same, meshes_and_sizes)


def meshes_and_sizes(api: Api) -> Any:
    def tried(mesh: Any, reshard: Any = None) -> Any:
        return raised(lambda: api.fully_shard(net(), mesh=mesh, reshard_after_forward=reshard))

    sizes = ["x", 0.5, 2.0, [2], 0, -1, 3, 5, 8, 1, 2, 4, True, False, None]
    named = mesh_of(1, 4, names=("r", "s"))
    return (
        [
            tried(mesh_of(1, 1, 4)),
            tried(mesh_of(1, 2, 2, names=("a", "b", "c"))),
            tried(mesh_of(1, 4)),
            tried(named),
        ],
        [tried(mesh_of(4), size) for size in sizes],
        [tried(named, size) for size in sizes],
    )


@rows("1.15")
def test_size_of_one_warns(two: Pool) -> None:
    two.run(eager_same, size_of_one_warns)


def size_of_one_warns(api: Api) -> Any:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    torch._logging._internal.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        for _ in range(2):
            api.fully_shard(net(), reshard_after_forward=1)
    finally:
        logger.removeHandler(handler)
    return [(r.levelname, "reshard_after_forward=1" in r.getMessage()) for r in records]


@rows("1.15", "1.16")
def test_size_of_one_and_of_all(two: Pool) -> None:
    two.run(same, size_of_one_and_of_all, 1)
    two.run(eager_same, size_of_one_and_of_all, 2)


def size_of_one_and_of_all(api: Api, size: int) -> Any:
    model = api.units(net(), "0", "2", reshard_after_forward=size)
    call = api.compile(model)
    train_step(call)
    return plain(grads(model)), counted_step(call)


@rows("1.15", "1.16", status="eager")
def test_registered_after_forward(four: Pool) -> None:
    four.run(eager_same, registered_after_forward, (1, 4))


def registered_after_forward(api: Api, sizes: tuple[int, ...]) -> Any:
    found = []
    for mesh in (mesh_of(4), mesh_of(1, 4, names=("r", "s"))):
        for size in sizes:
            model = api.fully_shard(net(), mesh=mesh, reshard_after_forward=size)
            out = model(batch())
            meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
            found.append((plain(params(model)), [(m.mesh, m.mesh_dim_names) for m in meshes]))
            out.sum().backward()
            found.append(is_sharded(model))
    return found


@rows("1.18")
def test_size_between(four: Pool) -> None:
    four.run(close, size_between, 4)
    four.run(close_eager, size_between, 1, 4)


def size_between(api: Api, *shape: int) -> Any:
    mesh = mesh_of(*shape, names=("r", "s")[-len(shape) :])
    model = api.units(net(), "0", "2", mesh=mesh, reshard_after_forward=2)
    call = api.compile(model)
    losses = [train_step(call, step) for step in range(2)]
    return losses, plain(grads(model)), counted_step(call)


@rows("1.19")
def test_placement_result_that_is_refused(two: Pool) -> None:
    two.run(same, placement_results)


def placement_results(api: Api) -> Any:
    results = ("x", 0, Replicate(), (Shard(0),), None, Shard(0))
    found = [
        raised(lambda r=r: api.fully_shard(net(), shard_placement_fn=lambda p: r)) for r in results
    ]
    assert api.is_stock or set(found) == {None, "ValueError"}
    return [
        error is None for error in found
    ]  # stock of torch 2.11 finds no attribute of what it was given


@rows("1.21", status="improved")
def test_placement_fn_calls(two: Pool) -> None:
    """Called once for each parameter; stock calls it twice since torch 2.13, so that it must be
    deterministic.
    """
    two.run(each, placement_fn_calls)


def placement_fn_calls(api: Api) -> None:
    for one, times in ((api, 1), (Api("stock"), 1 if ShardPlacementResult is None else 2)):
        model = net()
        ignored, seen = model[0].weight, []
        given = [p for p in model.parameters() if p is not ignored]
        one.fully_shard(model, shard_placement_fn=seen.append, ignored_params={ignored})
        assert [sum(p is s for s in seen) for p in given] == [times] * 5
        assert len(seen) == 5 * times


@rows("1.22")
def test_policies(two: Pool) -> None:
    two.run(same, policies)


def policies(api: Api) -> Any:
    policy = api.MixedPrecisionPolicy()
    torchs = (
        torch.distributed.fsdp.MixedPrecisionPolicy()
    )  # ours has what torch 2.15 adds, on older torch too
    pinless, base = api.CPUOffloadPolicy(pin_memory=False), api.OffloadPolicy()
    models = [api.fully_shard(net(), offload_policy=p) for p in (pinless, base, None)]
    return (
        {name: getattr(policy, name) for name in vars(torchs)},
        raised(lambda: setattr(policy, "param_dtype", torch.float16)),
        raised(lambda: api.MixedPrecisionPolicy(param_dtype="x")),
        raised(
            lambda: api.fully_shard(
                net(), mp_policy=api.MixedPrecisionPolicy(torch.int32, torch.bool)
            )
        ),
        [train_step(api.compile(m)) for m in models],
        [grads(m) for m in models],
    )


@rows("1.24")
def test_ignored_by_identity(two: Pool) -> None:
    two.run(same, ignored_by_identity)


def ignored_by_identity(api: Api) -> Any:
    model, twin = net(), net()
    kept = model[0].weight
    api.fully_shard(model, ignored_params={kept, twin[2].weight})
    loss = train_step(api.compile(model))
    return is_sharded(model), model[0].weight is kept, loss, grads(model)


@rows("1.25", "1.26")
def test_parameters_that_are_refused(two: Pool) -> None:
    two.run(same, parameters_that_are_refused)


def parameters_that_are_refused(api: Api) -> Any:
    scalar, strided, ignoring = Odd(), net(), Odd()
    scalar.inner[0].bias = nn.Parameter(torch.tensor(1.0))
    ignoring.scale = nn.Parameter(torch.tensor(1.0))
    strided[2].weight = nn.Parameter(torch.randn(7, 7).t())
    on_scalar, on_strided = (raised(lambda m=m: api.fully_shard(m)) for m in (scalar, strided))
    text = message(lambda: api.fully_shard(_with_scalar("alpha")))
    about = message(lambda: api.fully_shard(_strided()))
    named = ["alpha" in text, "1D" in text, "[2, 3]" in about, "(1, 2)" in about]
    api.fully_shard(ignoring, ignored_params={ignoring.scale})
    return on_scalar, on_strided, named, is_sharded(ignoring)


def _with_scalar(name: str) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_parameter(name, nn.Parameter(torch.tensor(1.0)))
    return module


def _strided() -> nn.Module:
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(torch.randn(3, 2).t())
    return module


@rows("1.32")
def test_replicated_subtree_is_skipped(two: Pool) -> None:
    two.run(same, replicated_subtree)


def replicated_subtree(api: Api) -> Any:
    @contract()
    def replicate(module: Any) -> Any:
        return module

    model, root = net(), net()
    replicate(model[2])
    replicate(root)
    api.fully_shard(model)
    api.fully_shard(root)
    return is_sharded(model), is_sharded(root), type(root).__name__, root(batch())


def _bad(*faults: str) -> tuple[Any, dict[str, Any]]:
    """A model and arguments with these faults."""
    model, kwargs = net(), {}
    if "container" in faults:
        model = nn.ModuleList(model)
    if "strided" in faults:
        model[0].weight = nn.Parameter(torch.randn(6, 7).t())
    if "scalar" in faults:
        model[2].bias = nn.Parameter(torch.tensor(1.0))
    if "unnamed" in faults:
        kwargs["mesh"] = mesh_of(1, 2)
    if "reshard" in faults:
        kwargs["reshard_after_forward"] = "x"
    if "uneven" in faults:
        kwargs["shard_placement_fn"] = lambda p: Shard(p.dim() - 1)
    if "range" in faults:
        kwargs["shard_placement_fn"] = lambda p: Shard(3)
    return model, kwargs


ORDER = [
    ("container", "unnamed"),
    ("unnamed", "reshard"),
    ("unnamed", "strided"),
    ("unnamed", "scalar"),
    ("reshard", "strided"),
    ("reshard", "range"),
    ("reshard", "uneven"),
    ("strided", "range"),
]


@rows("1.33")
def test_failure_order(two: Pool) -> None:
    two.run(same, failure_order)


def failure_order(api: Api) -> Any:
    found = []
    for faults in ORDER:
        model, kwargs = _bad(*faults)
        found.append(
            (
                faults,
                raised(lambda m=model, k=kwargs: api.fully_shard(m, **k)),
                type(model).__name__,
            )
        )
    return found


@rows("1.33")
def test_failure_order_of_parameters(two: Pool) -> None:
    two.run(same, failure_order_of_parameters)


def failure_order_of_parameters(api: Api) -> Any:
    found = []
    for faults in (("strided", "scalar"), ("scalar", "range"), ("scalar", "uneven")):
        model, kwargs = _bad(*faults)
        found.append(raised(lambda m=model, k=kwargs: api.fully_shard(m, **k)))
    return found


# -- chapter 2


@rows("2.1", "2.4", "2.6")
def test_class_and_names(two: Pool) -> None:
    two.run(same, class_and_names)


def class_and_names(api: Api) -> Any:
    model, linear = Odd(), api.fully_shard(nn.Linear(2, 2))
    names = (
        list(dict(model.named_parameters())),
        list(dict(model.named_buffers())),
        list(dict(model.named_modules())),
    )
    api.units(model, "inner.0", "inner")
    kept = (
        list(dict(model.named_parameters())),
        list(dict(model.named_buffers())),
        list(dict(model.named_modules())),
    )
    assert kept == names
    order = type(model).__mro__
    return (
        kept,
        list(model.state_dict()),
        [type(m).__name__ for m in model.modules()],
        [isinstance(m, api.FSDPModule) for m in model.modules()],
        [type(linear).__name__, isinstance(linear, api.FSDPModule), isinstance(linear, nn.Linear)],
        [
            order[1] is api.FSDPModule,
            order.index(api.FSDPModule) < order.index(Odd),
            order[-1] is object,
        ],
        [model.unshard(), is_sharded(model), model.reshard(), is_sharded(model)],
    )


@rows("2.1", status="improved")
def test_owners_get_a_subclass(two: Pool) -> None:
    """Modules that own sharded parameters get a subclass of the same name: that is why the whole
    model traces to one graph.
    """
    two.run(each, owners_get_a_subclass)


def owners_get_a_subclass(api: Api) -> None:
    linear, tanh = api.fully_shard(net())[:2]
    assert type(tanh) is nn.Tanh
    assert type(linear) is not nn.Linear
    assert isinstance(linear, nn.Linear)
    assert (type(linear).__name__, type(linear).__qualname__, type(linear).__module__) == (
        nn.Linear.__name__,
        nn.Linear.__qualname__,
        nn.Linear.__module__,
    )
    assert repr(linear) == repr(nn.Linear(6, 7))


@rows("2.3")
def test_one_class_for_all(two: Pool) -> None:
    two.run(same, one_class_for_all)


def one_class_for_all(api: Api) -> Any:
    models = [api.fully_shard(nn.Linear(n, 2)) for n in (2, 3)] + [api.units(net(), "0", "2")[0]]
    return [type(m) is type(models[0]) for m in models], type(api.fully_shard(net())) is type(
        api.units(net(), "0")
    )


@rows("2.3")
def test_one_class_whatever_is_managed(two: Pool) -> None:
    two.run(same, one_class_whatever_is_managed)


def one_class_whatever_is_managed(api: Api) -> Any:
    a, b = api.fully_shard(nn.Linear(2, 2)), api.fully_shard(nn.Linear(2, 2, bias=False))
    return type(a) is type(b)


@rows("2.7", "2.9")
def test_slices_and_copies(two: Pool) -> None:
    two.run(same, slices_and_copies)


def slices_and_copies(api: Api) -> Any:
    model = api.fully_shard(net())
    part, built = model[:2], type(api.fully_shard(nn.Linear(2, 2)))(3, 4, bias=False)
    found = [(type(m).__name__, isinstance(m, api.FSDPModule)) for m in (part, built)]
    copies = (model, nn.Sequential(model), [model])
    return (
        found,
        part[0] is model[0],
        tuple(built.weight.shape),
        [raised(lambda m=m: copy.deepcopy(m)) for m in copies],
    )


@rows("2.10")
def test_marks(two: Pool) -> None:
    two.run(same, marks)


def marks(api: Api) -> Any:
    model = nn.Sequential(Odd(), net())
    api.fully_shard(model[0].inner)
    before = [_marks(m) for m in model.modules()]
    api.fully_shard(model)
    return before, [_marks(m) for m in model.modules()]


def _marks(module: Any) -> Any:
    return [
        getattr(module, name, None) for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    ]


@rows("2.10")
def test_marks_where_all_is_ignored(two: Pool) -> None:
    two.run(same, marks_where_all_is_ignored)


def marks_where_all_is_ignored(api: Api) -> Any:
    model = nn.Sequential(Odd(), net())
    model[1].register_buffer("extra", torch.ones(1))
    api.fully_shard(model, ignored_params={*model[0].inner.parameters(), *model[1].parameters()})
    return [_marks(m) for m in model.modules()]


@rows("2.11", "2.12", "2.13")
def test_parameter_objects(two: Pool) -> None:
    two.run(same, parameter_objects)


def parameter_objects(api: Api) -> Any:
    model = net()
    model[0].bias.requires_grad_(False)
    old = dict(model.named_parameters())
    api.units(model, "0", "2")
    new, call = list(model.parameters()), api.compile(model)
    optimizer = torch.optim.SGD([p for p in new if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(3):
        train_step(call, step)
        counts = communications(optimizer.step)
        optimizer.zero_grad()
    return (
        [p is old[name] for name, p in model.named_parameters()],
        [
            type(p) is nn.Parameter or (isinstance(p, nn.Parameter) and isinstance(p, DTensor))
            for p in new
        ],
        [p.requires_grad for p in new],
        [a is b for a, b in zip(new, model.parameters(), strict=True)],
        counts,
        params(model),
    )


@rows("2.11", status="improved")
def test_what_a_model_notes_on_its_parameters(two: Pool) -> None:
    """Stock loses it; ours keeps numbers and words, of which groups of an optimizer are made."""
    two.run(each, noted_parameters)


def noted_parameters(api: Api) -> None:
    for of, is_kept in ((Api("stock"), False), (api, True)):
        model = net()
        model[0].weight.group = "first"  # type: ignore[assignment]
        of.units(model, "0")
        assert hasattr(model[0].weight, "group") == is_kept


@rows("2.14")
def test_state(two: Pool) -> None:
    two.run(same, state_access)


def state_access(api: Api) -> Any:
    model = api.units(net(), "0")
    state = api.fully_shard.state
    found = [state(m) is not None for m in model.modules()], state(model) is model._get_fsdp_state()
    return found, raised(lambda: api.FSDPModule._get_fsdp_state(net()))


@pytest.mark.parametrize("steps", [0, 1])
@rows("2.14")
def test_model_is_freed(two: Pool, steps: int) -> None:
    two.run(same, model_is_freed, steps)


def model_is_freed(api: Api, steps: int) -> Any:
    model = api.units(net(), "0")
    call = api.compile(model)
    for _ in range(steps):
        train_step(call)
    gone = (
        weakref.ref(model),
        weakref.ref(model[0]),
        weakref.ref(model[0].weight),
        weakref.ref(model._get_fsdp_state()),
    )
    del model, call
    torch._dynamo.reset()
    gc.collect()
    return [ref() is None for ref in gone]
