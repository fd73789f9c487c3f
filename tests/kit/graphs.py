"""The graphs that our backend makes of a model, to be looked at by tests."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from compiled_fsdp.compiler import backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph


@contextmanager
def captured(where: Any = backend) -> Iterator[list[Graph]]:
    """The final graphs that are made inside, in order of compilation: by our own backend, or by
    what calls the passes in `compiled_fsdp.compiler.inductor`.
    """
    graphs: list[Graph] = []
    original = where.run_half

    def run_half(gm: Any, **options: Any) -> Any:
        result = original(gm, **options)
        graphs.append(copy.deepcopy(result.graph))  # the executor changes its own later
        return result

    with mock.patch.object(where, "run_half", run_half):
        yield graphs


@contextmanager
def uncached() -> Iterator[None]:
    """Inside, every graph goes through all passes and Inductor. What the C++ compiler has made of
    the same source before is taken: without that (`force_disable_caches`), each graph begins by
    compiling torch's headers.
    """
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
