"""`mode` and `options` of `torch.compile` for our two backends by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.graphs import uncached
from torch import nn
from torch._inductor import config

from compiled_fsdp import fully_shard, pipeline

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp import Plan


def run(**options: Any) -> None:
    torch._dynamo.reset()
    net = fully_shard(nn.Linear(8, 8))
    torch.compile(net, fullgraph=True, **options)(torch.ones(2, 8)).sum().backward()


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    "options", [{"options": {"epilogue-fusion": False}}, {"mode": "max-autotune-no-cudagraphs"}]
)
def test_inductor_gets_them(options: dict[str, Any]) -> None:
    """As by the default backend."""
    found: list[tuple[bool, bool]] = []

    def noted(gm: GraphModule, plan: Plan) -> None:
        found.append((config.epilogue_fusion, config.max_autotune))

    with uncached(), pipeline(noted, before="verify"):
        run(backend="inductor", **options)
        by_default = found.copy()
        found.clear()
        run(backend="compiled_fsdp", **options)
    assert found == by_default
    assert set(found) == {("mode" in options, "mode" in options)}


@pytest.mark.usefixtures("fake_world")
def test_the_wrapper_in_cpp_is_refused() -> None:
    """Not a model of which nothing is sharded."""
    with config.patch(cpp_wrapper=True), uncached():
        with pytest.raises(Exception, match=r"Leave cpp_wrapper .* off"):
            run()
        torch.compile(nn.Linear(8, 8), fullgraph=True)(torch.ones(2, 8))


@pytest.mark.usefixtures("fake_world")
def test_unknown_option() -> None:
    with pytest.raises(Exception, match="Unexpected optimization option nonsense"):
        run(backend="compiled_fsdp", options={"nonsense": 1})


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    "options", [{"options": {"epilogue_fusion": False}}, {"mode": "max-autotune-no-cudagraphs"}]
)
def test_without_inductor_says_so(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="so they change nothing"):
        run(backend="compiled_fsdp_eager", **options)
