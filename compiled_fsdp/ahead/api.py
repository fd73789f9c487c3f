"""`precompile` and `load_precompiled`."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from compiled_fsdp.errors import named, warn_once
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.passes.pipeline import key as pipeline_key
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.compiled import is_compiled
from compiled_fsdp.torch_private.groups import assume_backend, is_alone, is_known

from . import facts as of_code
from . import folder as on_disk
from .capture import Call
from .delivery import delivered
from .loaded import ADVICE, COMPILE, Loaded, Ready
from .program import Program
from .ranks import programs_of
from .target import Target, check_extension, describe, differences, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from torch import nn

    from compiled_fsdp.units.unit import Unit

OTHERWISE = ("raise", COMPILE)


def precompile(
    model: nn.Module, example: Any, folder: str | PathLike[str], *, target: Target | None = None
) -> str:
    """Compile a sharded model for all ranks, in one process and without the others; nothing is
    computed.

    model: what `fully_shard` or `FullyShardedDataParallel` made, as rank 0 (or any) of the ranks
        that it is for: over a process group of the backend "fake" or "timed" of that size, say.
    example: the arguments of a call: a tuple of positional ones, a dict of those by name, or one
        tensor. Of tensors shape, stride, dtype and `requires_grad` matter, of all else the value.
    folder: a new one, in which code, kernels and a manifest are written.

    Returns:
        The SHA-256 of the manifest, which `load_precompiled` can be told to insist on.

    Raises:
        TypeError: the model is not sharded, or compiled already.
        NotImplementedError: something cannot be compiled ahead; it says what.
        ValueError: the plan decides from costs and has none, there are passes of one's own, or the
            other ranks are there, which would be waited for.
        FileExistsError: the folder is not empty.
    """
    target = target or Target()
    units = _units(model, "precompile")
    _check_plan()
    for param in (param for unit in units for param in unit.params):
        check_extension(param)
    _check_alone(units)
    if Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise FileExistsError(
            f"precompile: {folder} is not empty. Nothing is written over: name a new folder"
        )
    files: dict[str, bytes] = {}
    programs: list[Program] = []
    sources: dict[str, str] = {}
    with _as_over(units, target.group_backend):
        for mode in target.modes:
            with _in_mode(model, mode):
                call = Call(model, units, _call(example), mode, target.backend)
                found, functions = programs_of(call, files)
            programs += found
            sources = of_code.together(sources, functions)
        made_for = describe(model, units, target.backend)
    content = {
        "target": made_for,
        "sources": sources,
        "programs": [program.to_json() for program in programs],
    }
    return on_disk.write(Path(folder), content, files)


def load_precompiled(
    folder: str | PathLike[str],
    model: nn.Module,
    *,
    sha256: str | None = None,
    otherwise: str = "raise",
    readers: Sequence[int] | None = None,
) -> nn.Module:
    """Let a sharded model run what `precompile` wrote, from its first call on, on this rank.

    Every file is read and its SHA-256 compared before anything is executed; nothing is unpickled.
    What is executed is Python code and shared libraries of the folder: whoever may write there may
    run code here, unless `sha256` is given.

    sha256: what `precompile` returned; the folder must have a manifest of this SHA-256.
    otherwise: what happens if the model, this process or a later call is not what was compiled
        for: "raise", or "compile", which says so once and lets torch.compile compile it.
    readers: the ranks that read the folder, the same on all ranks, for example the first of each
        host; the others get its bytes from them through the process group, and check them as well.
        None: every rank reads.

    Returns:
        The model itself.

    Raises:
        TypeError: the model is not sharded, or compiled already.
        ValueError: `otherwise` or `readers` is none of what it can be.
        PrecompiledError: files are missing, changed or added; or (unless `otherwise`) something is
            not as it was compiled for, with everything that differs by name.
    """
    if otherwise not in OTHERWISE:
        raise ValueError(f"load_precompiled: otherwise={otherwise!r}; should be one of {OTHERWISE}")
    units = _units(model, "load_precompiled")
    path = Path(folder)
    content = on_disk.read(path) if readers is None else delivered(path, sha256, readers)
    manifest = on_disk.checked(content, path, sha256)
    made_for: dict[str, Any] = manifest["target"]
    programs = [Program.of(read) for read in manifest["programs"]]
    programs = [p for p in programs if dist.get_rank() in p.ranks]
    found = _differences(model, units, made_for, programs)
    found |= _of_sources(manifest["sources"])
    if found:
        error = mismatch(
            f"load_precompiled: {folder} was compiled for something else:", found, ADVICE
        )
        if otherwise != COMPILE:
            raise error
        warn_once(f"{error}. As was asked for, torch.compile compiles the model when it is called")
        model.compile(backend=made_for["backend"])
        return model
    digest = on_disk.digest(manifest)
    ready = {p.mode: Ready.of(p, content.files, units, digest) for p in programs}
    place: Any = model
    place._compiled_call_impl = Loaded(
        model, units, made_for["backend"], made_for, ready, otherwise
    )
    return model


def _differences(
    model: nn.Module, units: Sequence[Unit], made_for: dict[str, Any], programs: Sequence[Program]
) -> dict[str, tuple[str, str]]:
    """All in which this process and its model differ from what was compiled for. Whether modules
    are in training mode is seen in each call.
    """
    found = differences(made_for, describe(model, units, made_for["backend"]))
    for program in programs:
        lasting = {n: v for n, v in program.facts.items() if not n.endswith(".training")}
        now = of_code.current(lasting, model)
        found |= {of_code.in_words(n): v for n, v in differences(lasting, now).items()}
        missing = [name for name in program.groups if not is_known(name)]
        found |= {f"process group {name}": ("used by forward", "unknown") for name in missing}
    return found


def _of_sources(made_for: dict[str, str]) -> dict[str, tuple[str, str]]:
    found = differences(made_for, of_code.sources_now(made_for))
    return {f"source of {name}": values for name, values in found.items()}


def _units(model: Any, doing: str) -> list[Unit]:
    """The units of a sharded model, in order.

    Raises:
        TypeError: it is not the outermost sharded module, or compiled already.
    """
    state = get_state(model)
    if is_compiled(model) or state is None or not state.unit.is_outermost:
        raise TypeError(
            f"{doing}: {named(model)} is not what fully_shard or FullyShardedDataParallel made of "
            "a whole model. Pass that, before torch.compile"
        )
    if model._compiled_call_impl is not None:
        raise TypeError(
            f"{doing}: {named(model)} is compiled already, by model.compile() or load_precompiled. "
            "Leave that out"
        )
    return [runtime.unit for runtime in state.runtime.tree.in_order()]


def _check_alone(units: Sequence[Unit]) -> None:
    for group in [axis for unit in units for axis in unit.mesh_info.axes]:
        if not is_alone(group):
            raise ValueError(
                f"precompile: the model is sharded over a process group of {group.size()} ranks "
                f"and the backend {dist.get_backend(group)!r}, which would look at its first call "
                "together, and wait for each other. Compile in a process of its own: "
                f'init_process_group("fake", store=FakeStore(), rank=0, '
                f"world_size={group.size()}), and "
                "Target(group_backend=...) names the ranks' own backend"
            )


def _check_plan() -> None:
    if pipeline_key() is None:
        raise ValueError(
            "precompile: the pipeline has passes of your own, whose source nobody knows. Leave "
            "them out, or compile with torch.compile"
        )
    plan = current_plan()
    if plan.is_from_costs and plan.costs is None:
        raise ValueError(
            "precompile: the plan decides from costs and has none, and there are no ranks here to "
            "measure them. Pass Plan(costs=...), for example as measured on the cluster before"
        )


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


@contextmanager
def _as_over(units: Sequence[Unit], backend: str) -> Iterator[None]:
    """Inside, units tell graphs that they communicate over groups of this backend."""
    try:
        with assume_backend(backend):
            for unit in units:
                unit.publish()
            yield
    finally:
        for unit in units:
            unit.publish()


@contextmanager
def _in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """The modules in evaluation mode for "inference", and as they were afterwards."""
    before = [(module, module.training) for module in model.modules()]
    if mode == "inference":
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
