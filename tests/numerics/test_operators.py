"""Operators with functions of their own inside a forward: `torch.func`'s transformations, `cond`,
`scan`, `while_loop`, `map`, FlexAttention. They read sharded parameters like any other code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit import beside as by
from kit.compare import CLOSE, check_equal, whole
from kit.harness import IS_2_11, SLOW
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import FullyShardedDataParallel, fully_shard
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.ir.schema import UNSHARD, param_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

WIDTH, ROWS = 6, 4


def grad_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + 0.1 * torch.func.grad(lambda y: layer(y).square().sum())(x)


def jvp_of(layer: nn.Module, x: Tensor) -> Tensor:
    return sum(torch.func.jvp(lambda y: layer(y).tanh(), (x,), (torch.ones_like(x),)))


def adapted(layer: nn.Module, x: Tensor) -> Tensor:
    """Computes with parameters after a step of its own, through which gradients go."""

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, given, (x,)).square().mean()

    own = dict(layer.named_parameters())
    grads = torch.func.grad(loss)(own)
    return torch.func.functional_call(layer, {k: own[k] - 0.1 * grads[k] for k in own}, (x,))


TRANSFORMATIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad, jvp": lambda layer, x: jvp_of(layer, grad_of(layer, x)),
    "vmap": lambda layer, x: checkpoint(torch.vmap(layer), x, use_reentrant=False),
    "vmap, and called": lambda layer, x: layer(torch.vmap(layer)(x)),
    "adapted": adapted,
}


class Net(nn.Module):
    """`apply(layer, x)`, or `apply(layer, other, x)`, between layers."""

    def __init__(self, apply: Callable[..., Tensor], num_layers: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.apply_ = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.apply_(*self.layers, self.first(x)))


def train(make: Callable[[], Any], kind: str, same: bool, apart: bool) -> list[Tensor]:
    """Losses, evaluations, and, but for FSDP1, whose parameters are views, parameters in the end.

    kind: "unsharded", or words among "fsdp1", "eager", "compiled" and "kept".
    same: the ranks' batches are the same; otherwise each has its own.
    apart: layers are units of their own.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = make()
    layers = model.layers if apart else ()
    if "fsdp1" in kind:
        for number, layer in enumerate(layers):
            model.layers[number] = flat(layer)
        model = flat(model)
    elif kind != "unsharded":
        for layer in (*layers, model):
            fully_shard(layer, reshard_after_forward=False if "kept" in kind else None)
        if "kept" in kind:
            model.set_reshard_after_backward(False)
    call = model
    if "compiled" in kind:
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step + (0 if same else 10 * dist.get_rank()))
        loss = call(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        for parameter in model.parameters() if kind == "unsharded" else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        with torch.no_grad():
            found.append(call(torch.ones(ROWS, WIDTH)))
        assert not any(state.runtime.is_unsharded for state in states_below(model))
    return found if "fsdp1" in kind else found + [whole(p.detach()) for p in model.parameters()]


def flat(module: nn.Module) -> Any:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def compare(make: Callable[[], Any], *more: str, same: bool = True, apart: bool = True) -> None:
    kinds = ("unsharded", "eager", "compiled", *more)
    expected, *others = (train(make, kind, same, apart) for kind in kinds)
    for found in others:
        assert len(found) >= 6
        assert all(map(torch.equal, found, expected))


def test_transformations(two: Pool) -> None:
    two.run(transformations, timeout=SLOW)


def transformations() -> None:
    for name in TRANSFORMATIONS:
        is_read_outside = name == "adapted"  # of the layer's own forward
        more = ("fsdp1 eager", "fsdp1 compiled") if name == "grad, jvp" else ()
        more = ("kept compiled",) if name == "vmap" else more
        compare(lambda name=name: Net(TRANSFORMATIONS[name]), *more, apart=not is_read_outside)


def test_a_whole_forward_inside_vmap(two: Pool) -> None:
    """Units are gathered while it is under way."""
    two.run(whole_forward)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.layers[1](self.layers[0](row)))(x)


def whole_forward() -> None:
    """The outermost module itself: in a graph, and where nothing is trained; else it is refused."""
    compare(Rows)
    torch.manual_seed(0)
    model: Any = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH)
    expected = model(x).detach()
    fully_shard(model)
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(x), expected)
    assert not model._fsdp_own().runtime.is_unsharded
    with pytest.raises(NotImplementedError, match="Linear, is called inside of a transformation"):
        torch.vmap(model)(x)
    rows = torch.compile(lambda x: torch.vmap(model)(x), backend="compiled_fsdp_eager")
    assert torch.equal(rows(x), expected)


# -- control flow: parameters are gathered before it


def branch(layer: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda y: layer(y).tanh(), lambda y: other(y), (x,))
    return result


def checkpointed(layer: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint in one of the branches."""

    def again(y: Tensor) -> Tensor:
        return checkpoint(layer, y, use_reentrant=False).tanh()

    result: Tensor = torch.cond(x.sum() > 0, again, lambda y: other(y), (x,))
    return result


def ranks_part() -> bool:
    """Whether in the first step of `train` ranks take other branches."""
    torch.manual_seed(0)
    first = Net(branch, num_layers=2).first
    torch.manual_seed(10 * dist.get_rank())
    taken = (first(torch.randn(ROWS, WIDTH)).sum() > 0).float()
    dist.all_reduce(taken)
    return 0 < taken.item() < dist.get_world_size()


def recurrent(layer: nn.Module, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(layer(state)), state + row

    return scan(step, torch.zeros(WIDTH), x)[1]


def test_control_flow(two: Pool) -> None:
    two.run(control_flow, timeout=SLOW)


def control_flow() -> None:
    """In a branch each rank takes its own: whoever takes the other gives zeros."""
    assert ranks_part()
    compare(lambda: Net(checkpointed, num_layers=2), same=False)
    if not IS_2_11:  # scan "might be aliasing the input or the output", unsharded too
        compare(lambda: Net(recurrent))


def looped(layer: nn.Module, x: Tensor) -> Tensor:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(layer(y))

    return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1]


class Attention(nn.Module):
    """Scores get a bias that is trained; what is masked depends on another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor([2.0]), requires_grad=False)  # or torch refuses it
        self.layers = nn.ModuleList([nn.Linear(4, 12)])
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layers[0](x).view(1, ROWS, 3, 2, 2).unbind(2)
        heads = [t.transpose(1, 2) for t in (q, k, v)]

        def biased(score: Tensor, _b: Tensor, h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
            return score + self.bias[h]

        def near(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i - j <= self.bound[0]

        mask = create_block_mask(near, None, None, ROWS, ROWS, device="cpu")
        return flex_attention(*heads, score_mod=biased, block_mask=mask).flatten()


@pytest.mark.usefixtures("fake_world")
def test_reads_are_moved_out() -> None:
    """Of each operator; what checkpointing computes again gathers again, and stays."""
    layers = {
        "cond": ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"),
        "while_loop": ("layers.0.weight", "layers.0.bias"),
        "scan": ("layers.0.weight", "layers.0.bias"),
        "map_impl": ("layers.0.weight", "layers.0.bias"),
    }
    nets = {"cond": (branch, 2), "while_loop": (looped, 1), "scan": (recurrent, 1)}
    nets["map_impl"] = (map_rows, 1)
    for name, (apply, count) in nets.items():
        module = Net(apply, count)
        assert read_by(module, torch.randn(ROWS, WIDTH), name) == ([*layers[name]], 0), name
    attention = read_by(Attention(), torch.randn(ROWS, 4), "flex_attention")
    assert attention == (["bias", "bound"], 0)
    kept = Net(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    _, inside = read_by(kept, torch.randn(ROWS, WIDTH), "tag_activation_checkpoint")
    assert inside == 2
    both = read_by(Net(checkpointed, 2), torch.randn(ROWS, WIDTH), "cond")
    assert both == ([*layers["cond"]], 0)


def read_by(module: Any, x: Tensor, operator: str) -> tuple[list[str], int]:
    """Which parameters an operator in Dynamo's graph is handed over, and how many reads there are
    inside of functions.
    """
    torch._dynamo.reset()
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, _: object) -> Any:
        graphs.append(gm)
        return gm.forward

    for layer in (*module.layers, module):
        fully_shard(layer)
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(x)
    (gm,) = graphs
    (call,) = (n for n in gm.graph.nodes if getattr(n.target, "_name", "") == operator)
    reads = [n for n in call.all_input_nodes if n.target is UNSHARD]
    names = [param_spec(node).fqn for node in reads]
    inside = [
        node
        for name, part in gm.named_modules()
        if name and isinstance(part, GraphModule)
        for node in part.graph.find_nodes(op="call_function", target=UNSHARD)
    ]
    return names, len(inside)


class Tied(nn.Module):
    """A weight of a unit that is read outside of it, too, by a layer and by a branch."""

    def __init__(self, *, calls_unit: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.first.weight = self.layers[0].weight
        self.calls_unit = calls_unit

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).tanh() if self.calls_unit else x
        x = self.first(x).tanh()

        def read(y: Tensor) -> Tensor:
            return nn.functional.linear(y, self.first.weight)

        return self.last(torch.cond(x.sum() > 0, read, lambda y: y * 0.5, (x,)))


def test_what_a_graph_delivers_is_still_needed(two: Pool) -> None:
    """In eager mode a branch is a graph, whose backward ends before that of the layer, which has
    read the same parameter.
    """
    two.run(tied)


def tied() -> None:
    for calls_unit in (True, False):
        expected, found = (
            train(lambda calls_unit=calls_unit: Tied(calls_unit=calls_unit), kind, False, True)
            for kind in ("unsharded", "eager")
        )
        check_equal(found, expected, f"{calls_unit=}", *CLOSE)


def substituted(layer: nn.Module, x: Tensor) -> Tensor:
    """A branch has read what is replaced afterwards."""
    x = torch.cond(x.sum() > 0, lambda y: layer(y).tanh(), lambda y: y * 0.5, (x,))
    halved = {"weight": layer.weight * 0.5}
    result: Tensor = torch.func.functional_call(layer, halved, (x,))
    return result


def test_what_a_branch_has_read_can_be_replaced(two: Pool) -> None:
    """In the same graph: the second read was of the parameter, not of what stands for it."""
    two.run(replaced)


def replaced() -> None:
    expected, *others = (
        train(lambda: Net(substituted), kind, False, False)
        for kind in ("unsharded", "eager", "compiled")
    )
    for found in others:
        check_equal(found, expected, "replaced", *CLOSE)


# -- what cannot be reduced


def test_sparse_gradients_are_refused(two: Pool) -> None:
    """As in stock, but by name."""
    two.run(sparse)


def sparse() -> None:
    for compiles in (False, True):
        torch._dynamo.reset()
        model: Any = fully_shard(nn.Embedding(5, 4, sparse=True))
        call = torch.compile(model, backend="compiled_fsdp_eager") if compiles else model
        with pytest.raises(
            Exception, match=r"gradient of weight is sparse .* Build its module with sparse=False"
        ):
            call(torch.tensor([1, 2])).sum().backward()


class Tangent(by.Net):
    def forward(self, x: Tensor) -> Tensor:
        y, slope = torch.func.jvp(lambda y: self.a(y).tanh(), (x,), (torch.ones_like(x),))
        return super().forward(y + slope)


class Slope(by.Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.func.grad(lambda y: self.a(y).tanh().sum())(x))


def backward_again(side: by.Side, kind: Any) -> None:
    model = side.shard(kind(), "a")
    optimizer = side.sgd(model.parameters())
    for step in range(2):
        loss = model(side.batch(step)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("kind", [Tangent, Slope])
def test_another_backward_through_a_transformation(two: Pool, kind: Any) -> None:
    """In eager mode the first has freed, and reduced, what it used."""
    two.run(eagerly_again, kind)


def eagerly_again(kind: Any) -> None:
    by.beside(backward_again, kind, kinds=("eager",))
