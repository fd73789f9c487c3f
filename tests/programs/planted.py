"""Faults that were mended once, planted again: the generator must find each of them.

Each is the smallest change of today's code that brings the old behaviour back, made in the worker
that runs a program.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from programs.program import Program

    Plant = Callable[[], contextlib.AbstractContextManager[object]]

PLANTS: dict[str, Plant] = {}
# What a program says in which each can show: statements, ways to compile, optimizers, "heads",
# "budget" or "step"; "+": both.
SHOWN_BY = {
    "substitutions_are_ignored": {
        "substitute",
        "substitute_own",
        "substitute_buffer",
        "functional",
    },
    "iterating_yields_sharded_parameters": {
        "norm_of_all",
        "norm_of_layer",
        "named",
        "dtype",
        "finfo",
        "numel",
    },
    "ties_after_sharding_are_forgotten": {"tie_after", "tie_head_after", "share_after"},
    "every_backward_counts_as_whole": {
        "input_grad",
        "input_backward",
        "input_grad_after",
        "accumulate_input_grad",
    },
    "writes_in_a_trace_are_not_settled": {
        "clamp_",
        "data_clamp_",
        "copy_",
        "data_copy_",
        "normalize",
        "embed_max_norm",
    },
    "unused_heads_get_zeros": {"heads"},
    "collectives_of_the_user_are_judged": {
        "all_to_all"
    },  # of two waits for one collective a graph keeps one
    "freezing_is_not_followed": {"freeze", "unfreeze"},
    "compiling_in_place_begins_in_torch": {"in_place", "in_place_before"},
    "full_parameters_outlive_a_step": {"keep+adamw_fused"},
    "writes_without_a_version_are_missed": {
        "momentum_data_mul_",
        "momentum_foreach",
        "foreach_data",
        "decay_data",
    },
    "each_rank_fits_its_own_budget": {"rank_batch+budget", "one_row+budget"},
    "reads_stay_inside_of_branches": {"cond", "cond_read", "cond_two", "scan", "map"},
    "what_is_transformed_is_not_reduced": {"func_grad", "vmap", "jvp", "vjp", "jacobian"},
    "whole_steps_keep_gradients": {"step"},
    "a_traced_backward_leaves_nothing": {"train_traced"},
}


def can_show(program: Program, name: str) -> bool:
    """Whether a program says something that this fault breaks."""
    said = program.names() | {program.way, program.optimizer}
    also = {"heads": program.heads, "budget": program.budget is not None}
    also["step"] = program.step is not None
    said |= {word for word, is_so in also.items() if is_so}
    return any({*words.split("+")} <= said for words in SHOWN_BY[name])


def plant(make: Callable[[], Iterator[None]]) -> Plant:
    """A fault, by the name of the function that plants it."""
    PLANTS[make.__name__] = contextlib.contextmanager(make)
    return PLANTS[make.__name__]


def planted(name: str) -> contextlib.AbstractContextManager[object]:
    """Ours with that fault; nothing for ""."""
    return PLANTS[name]() if name else contextlib.nullcontext()


def _ours(name: str) -> Any:
    return import_module(f"compiled_fsdp.{name}")


@plant
def substitutions_are_ignored() -> Iterator[None]:
    """What `functional_call` puts in a parameter's place is not read in a graph."""
    registered = _ours("units.registered").Registered
    assign = registered.__setitem__

    def forget(self: Any, name: str, value: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            dict.__setitem__(self, name, value)
        else:
            assign(self, name, value)

    with mock.patch.object(registered, "__setitem__", forget):
        yield


@plant
def iterating_yields_sharded_parameters() -> Iterator[None]:
    """`self.parameters()` in a graph gives what is registered at rest."""
    with mock.patch.object(_ours("units.registered"), "is_in_forward", _no):
        yield


def _no(_unit: str) -> bool:
    return False


@plant
def ties_after_sharding_are_forgotten() -> Iterator[None]:
    """A parameter of another unit, assigned, counts as a new value of the one in its place."""
    with mock.patch.object(_ours("units.registered"), "sharded_behind", return_value=None):
        yield


@plant
def every_backward_counts_as_whole() -> Iterator[None]:
    """`autograd.grad(loss, x)` marks, keeps and steps what a full backward would."""
    with contextlib.ExitStack() as stack:
        for name in ("units.owner", "eager.runtime", "eager.watch"):
            stack.enter_context(mock.patch.object(_ours(name), "accumulates", return_value=True))
        yield


@plant
def writes_in_a_trace_are_not_settled() -> Iterator[None]:
    """After `clamp_` in a graph the second read of a parameter is of the old value."""
    with mock.patch.object(_ours("frontend.writes"), "written_storages", return_value=set()):
        yield


@plant
def unused_heads_get_zeros() -> Iterator[None]:
    """Parameters that only unused outputs of a graph lead to get zero gradients, which decay then
    moves.
    """
    with mock.patch.object(_ours("units.owner").BufferOwner, "leave_out", return_value=None):
        yield


@plant
def collectives_of_the_user_are_judged() -> Iterator[None]:
    """The verifier refuses a collective of the user's that is awaited twice."""
    with mock.patch.object(_ours("passes.invariants.messages"), "_ours", side_effect=list):
        yield


@plant
def freezing_is_not_followed() -> Iterator[None]:
    """A parameter that is frozen or unfrozen between steps stays as it was in its unit."""
    with mock.patch.object(_ours("units.unit").Unit, "follow_requires_grad", return_value=None):
        yield


@plant
def compiling_in_place_begins_in_torch() -> Iterator[None]:
    """`module.compile()` starts at a frame of torch's own, where no graph begins."""
    with mock.patch.object(_ours("frontend.entry"), "_begins_in_torch", return_value=False):
        yield


@plant
def full_parameters_outlive_a_step() -> Iterator[None]:
    """Full parameters that are kept are used again after a step of an optimizer that no version
    counts.
    """
    with contextlib.ExitStack() as stack:
        for name, value in (("num_steps", 0), ("_check_unwritten", None)):
            stack.enter_context(
                mock.patch.object(_ours("eager.full_params"), name, return_value=value)
            )
        yield


@plant
def writes_without_a_version_are_missed() -> Iterator[None]:
    """Momentum encoders that write by `.data` or foreach, after the gather for the next unit was
    started.
    """
    with contextlib.ExitStack() as stack:
        for name in ("eager.full_params", "units.gathered_ahead"):
            stack.enter_context(
                mock.patch.object(_ours(name), "check_unwritten", return_value=None)
            )
        yield


@plant
def each_rank_fits_its_own_budget() -> Iterator[None]:
    """Which parameters stay until backward is decided by each rank from the shapes of its own
    batch.
    """

    def mine(
        _graph: object, _plan: object, _what: str, words: list[int], _combine: object
    ) -> list[int]:
        return words

    with mock.patch.object(_ours("compiler.choices_of_all"), "agreed", mine):
        yield


@plant
def a_traced_backward_leaves_nothing() -> Iterator[None]:
    """`loss.backward()` traced into a compiled function leaves every `.grad` as it is, and nobody
    says so.
    """
    owner = _ours("units.owner").BufferOwner
    update = owner.update

    def forget(self: Any, grad: Any, offsets: Any, step: str, *rest: Any) -> None:
        if step != "backward":
            update(self, grad, offsets, step, *rest)

    with mock.patch.object(owner, "update", forget):
        yield


@plant
def reads_stay_inside_of_branches() -> Iterator[None]:
    """What a function of `torch.cond` or `scan` reads is gathered where it is read, by ranks that
    come there.
    """
    with mock.patch.object(_ours("frontend.writes"), "hoist_reads", return_value=None):
        yield


@plant
def what_is_transformed_is_not_reduced() -> Iterator[None]:
    """A unit that is called inside of `torch.vmap` or `torch.func.grad` is not told of the backward
    that comes through it.
    """
    transformed = _ours("eager.transformed")
    enter = transformed.enter

    def forget(runtime: Any) -> None:
        enter(runtime)
        runtime.tree.transformed.clear()

    with mock.patch.object(transformed, "enter", forget):
        yield


@plant
def whole_steps_keep_gradients() -> Iterator[None]:
    """`compile_step` leaves `.grad` to be added to, as if it had been asked to."""
    always = property(lambda _: True, lambda _, value: None)
    with mock.patch.object(_ours("frontend.step").Step, "keeps_grads", always, create=True):
        yield
