"""Reads of parameters in a trace: what Dynamo sees of one, what it guards on,
what a backend gets.
"""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch._dynamo.guards import GuardManagerWrapper
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.ir.spec import SPECS
from compiled_fsdp.units.reads import OP_OF

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule


class Net(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def sharded(*, recompute: bool = False) -> nn.Module:
    torch._dynamo.reset()
    net = Net(recompute=recompute)
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def graph_of(model: nn.Module) -> GraphModule:
    """What a backend gets."""
    found = []

    def backend(gm: GraphModule, _: object) -> GraphModule:
        found.append(gm)
        return gm

    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, 4))
    (gm,) = found
    return gm


def guards_of(model: nn.Module) -> str:
    """The guards of its graph, as a tree of lines."""
    old = [made for made in gc.get_objects() if type(made) is GuardManagerWrapper]
    graph_of(model)
    new = [made for made in gc.get_objects() if type(made) is GuardManagerWrapper]
    return max((str(made) for made in new if not any(made is each for each in old)), key=len)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backend_gets_the_ops_with_all_their_arguments(fake_world: None, recompute: bool):
    modules = [
        module
        for module in graph_of(sharded(recompute=recompute)).modules()
        if isinstance(module, torch.fx.GraphModule)
    ]
    nodes = [node for module in modules for node in module.graph.nodes]
    assert not [node for node in nodes if node.target in OP_OF]
    specs = [param_spec(node) for node in nodes if node.target is UNSHARD]
    assert sorted(spec.fqn for spec in specs) == sorted(
        f"layers.{n}.{name}" for n in range(3) for name in ("weight", "bias")
    )


def test_a_read_costs_few_guards(fake_world: None):
    """A handle, two of its fields, and the buffer: not one guard for each argument of the op, nor
    for what a plain read does not need.
    """
    tree = guards_of(sharded())
    of_bias = [
        line
        for line in tree.splitlines()
        if re.search(r"_modules\['1'\]._fsdp_handles\['bias'\]", line)
    ]
    fields = {found[1] for line in of_bias if (found := re.search(r"\['bias'\]\.(\w+)", line))}
    assert fields == {"is_plain", "key", "flat"}
    assert len(of_bias) <= 12, "\n".join(of_bias)
    assert "spec_" in tree
    # what a class has not is looked up by torch alone: torch 2.11 asks all bases of each
    others = [line for line in tree.splitlines() if "dict(type(" not in line]
    assert len(others) < 560, len(others)


def test_specs_are_named_by_their_content(fake_world: None):
    param = next(iter(sharded().layers[0]._fsdp_state.unit.params))
    assert SPECS[param.spec.key()] == param.spec
    assert param.handle.key == param.spec.key()
    assert re.fullmatch(r"spec_[0-9a-f]{32}", param.handle.key)


def test_other_reads_are_guarded_by_what_they_are(fake_world: None) -> None:
    """A frozen parameter beside trained ones is not read plainly; only its guards are more."""
    model = sharded()
    model.layers[1].bias.requires_grad_(False)
    model.layers[1]._fsdp_state.unit.follow_requires_grad()
    tree = guards_of(model)
    asked = re.findall(r"_modules\['(\d)'\]._fsdp_handles\['(\w+)'\]\.is_frozen ==", tree)
    assert set(asked) == {("1", "bias")}
