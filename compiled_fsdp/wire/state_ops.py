"""Kernels of the `fsdp::` ops that copy what an optimizer remembers from the host and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_fsdp.torch_private.groups import register_work

from .kernels import fake, kernel, owner_of


@kernel("fetch_state")
def _fetch_state(flat: Tensor, offsets: Sequence[int], step: str, numel: int) -> Tensor:
    state, work = owner_of(flat, "fetch_state").fetch_state(offsets, step, numel)
    if work is not None:
        register_work(state, work)
    return state


@fake("fetch_state")
def _fetch_state_fake(flat: Tensor, offsets: Sequence[int], step: str, numel: int) -> Tensor:
    return flat.new_empty(numel)


@kernel("store_state")
def _store_state(state: Tensor, flat: Tensor, offsets: Sequence[int], step: str) -> Tensor:
    """The token is there to be awaited; what is copied into outlives the graph, and is none of its
    values, whose memory compilers use again.
    """
    token = state.new_empty(1)
    register_work(token, owner_of(flat, "store_state").store_state(state, offsets, step))
    return token


@fake("store_state")
def _store_state_fake(state: Tensor, flat: Tensor, offsets: Sequence[int], step: str) -> Tensor:
    return state.new_empty(1)
