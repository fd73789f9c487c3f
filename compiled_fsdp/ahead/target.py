"""What a precompiled model is for, as plain values by name,
and what differs between two of these.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.compiler.inductor import source_hash
from compiled_fsdp.ir.spec import SPECS
from compiled_fsdp.passes.pipeline import key as pipeline_key
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.groups import backend_of, is_common
from compiled_fsdp.torch_private.ranks import mesh_in_words
from compiled_fsdp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.units.handles import Handle
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit

INDUCTOR_BACKEND, EAGER_BACKEND = "compiled_fsdp", "compiled_fsdp_eager"
BACKENDS = (INDUCTOR_BACKEND, EAGER_BACKEND)
MODES = ("training", "inference")
GROUPS = ("gloo", "timed", "fake")  # backends of process groups, over CPU tensors


class PrecompiledError(RuntimeError):
    """A precompiled model that is not what was written, or not for this process.

    differences: by name, what it was made for and what is here; empty if files are wrong.
    """

    def __init__(self, text: str, differences: dict[str, tuple[str, str]] | None = None) -> None:
        super().__init__(text)
        self.differences = differences or {}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What `precompile` compiles for, beside what the model and its process groups say.

    device: the kind of device; "cpu" alone so far.
    group_backend: of the ranks' process groups ("gloo"), whatever the groups of this process are.
    backend: "compiled_fsdp" (Inductor) or "compiled_fsdp_eager" (no Inductor).
    modes: "training" (forward and backward, as the model is), "inference" (`model.eval()`, under
        `torch.no_grad()`), or both.

    Raises:
        NotImplementedError: the device or the backend of the groups is not supported.
        ValueError: another field has an unknown value.
    """

    device: str = "cpu"
    group_backend: str = "gloo"
    backend: str = INDUCTOR_BACKEND
    modes: tuple[str, ...] = MODES

    def __post_init__(self) -> None:
        if self.device != "cpu":
            raise NotImplementedError(
                f"Target: device={self.device!r}; only 'cpu' can be compiled for ahead so far"
            )
        if self.group_backend not in GROUPS:
            raise NotImplementedError(
                f"Target: group_backend={self.group_backend!r}; should be one of {GROUPS}"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"Target: backend={self.backend!r}; should be one of {BACKENDS}")
        if not self.modes or not set(self.modes) <= set(MODES):
            raise ValueError(f"Target: modes={self.modes!r}; should be some of {MODES}")


ORDER, MISSING = "modules in order: ", "(nothing)"


def describe(model: nn.Module, units: Sequence[Unit], backend: str) -> dict[str, Any]:
    """What this process and the model in it are, by name.

    Raises:
        NotImplementedError: the model has something that cannot be compiled ahead.
    """
    found = {**_environment(backend), **settings()}
    found["world size"] = dist.get_world_size()
    paths = _paths(model)
    for number, unit in enumerate(units):
        found |= _of_unit(unit, f"unit {number} ({unit.name})")
        for place, flat in enumerate(unit.flats):
            for param in flat.params:
                found |= _of_param(param.handle, flat, param, (number, place))
                found[f"parameter {param.fqn}: held as"] = _held_as(param, paths)
    seen: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        kind = f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device.type}"
        if not buffer.is_contiguous():
            kind += f", strides {buffer.stride()}"
        same = seen.setdefault(id(buffer), name)
        found[f"buffer {name}"] = kind if same == name else f"the same as {same}"
    for path, module in model.named_modules():
        if len(module._modules) > 1:
            found[f"{ORDER}{path or 'model'}"] = ", ".join(module._modules)
    for name, param in ignored(model):
        kind = f"{tuple(param.shape)} {param.dtype} on {param.device.type}"
        found[f"parameter {name}, not sharded"] = kind + trained(requires_grad=param.requires_grad)
    return found


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Where each module of a model stands, now."""
    found: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(f"{path}." if path else "")
    return found


def _held_as(param: ShardedParam, paths: dict[nn.Module, list[str]]) -> str:
    """The names under which a model has a parameter; of one that is tied, several."""
    names = [f"{path}{name}" for module, name in param.owners for path in paths.get(module, ())]
    return ", ".join(sorted(names)) or "(nothing)"


def _environment(backend: str) -> dict[str, Any]:
    plan = current_plan()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "compiled_fsdp": __version__,
        "sources of compiled_fsdp": source_hash()[:16],
        "pipeline": pipeline_key(),
        "backend": backend,
        "device": "cpu",
        "Python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "machine": f"{platform.system()} {platform.machine()}",
    }
    found |= {f"Plan.{f.name}": repr(plan.shown(f.name)) for f in fields(plan)}
    if backend == INDUCTOR_BACKEND:
        found["instructions of the CPU"] = _instructions()
        found["threads (OMP_NUM_THREADS)"] = torch.get_num_threads()
    return found


def settings() -> dict[str, Any]:
    """Global settings of torch that a graph depends on."""
    return {
        "autocast": ", ".join(
            f"{torch.get_autocast_dtype(kind)} on {kind}"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        or "off",
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _instructions() -> str:
    """What the CPU can do, as the system says it: kernels are compiled for all of it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.is_file() else ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(flags[1].split())) if flags else platform.processor()


def _of_unit(unit: Unit, name: str) -> dict[str, Any]:
    policy = unit.mp_policy
    values = {f.name: getattr(policy, f.name) for f in fields(policy)}
    found = {
        f"{name}: mp_policy.{k}": str(v)
        for k, v in values.items()
        if v is None or isinstance(v, torch.dtype | bool)
    }
    found[f"{name}: reshard_after_forward"] = str(unit.reshard)
    for flat in unit.flats:
        info = flat.mesh_info
        found[f"{name}: mesh"] = f"{info.replicate_size} replicas, each of {info.shard_size} ranks"
        found[f"{name}: backend of the process group"] = backend_of(info.shard_group)
    return found


def check_extension(param: Any) -> None:
    """Fail for a parameter with an all-gather extension."""
    if param.extends:
        raise NotImplementedError(
            f"precompile: parameter {param.fqn} has an all-gather extension, which is not "
            "supported ahead of time. Shard it as a plain tensor, or use torch.compile"
        )


def _of_param(handle: Handle, flat: Any, param: Any, place: tuple[int, int]) -> dict[str, Any]:
    check_extension(param)
    if handle.is_resident:
        raise NotImplementedError(
            f"precompile: the full parameter {param.fqn} stays from one call to the next "
            "(set_reshard_after_backward(False)). Set it to True"
        )
    spec = SPECS[handle.key]
    name = f"parameter {param.fqn}"
    found = {f"{name}: {k}": v for k, v in _fields(spec).items()}
    found[f"{name}: place"] = f"buffer {place[1]} of unit {place[0]}, {flat.data.numel()} elements"
    requires_grad = param.sharded.requires_grad
    found[f"{name}: requires_grad"] = str(requires_grad)
    full = param.full
    dtensor = full and f"{full.spec.placements} over {mesh_in_words(full.spec.mesh)}"
    if full and full.typed:
        dtensor = f"a plain tensor, cut as {dtensor}, its gradient as {full.typed.grads}"
    found[f"{name}: read as"] = str((handle.view, dtensor))
    return found


def _fields(spec: ParamSpec) -> dict[str, str]:
    """The values of a spec, without the numbers of units, which another process counts
    otherwise.
    """
    if spec.hook or spec.gather_algorithm or spec.reduce_algorithm.startswith("custom"):
        raise NotImplementedError(
            f"precompile: parameter {spec.fqn} is communicated by a function of the user's "
            "(set_custom_all_gather, set_custom_reduce_scatter, set_all_reduce_hook), which "
            "stands in no file. Leave it out"
        )
    if spec.is_checked:
        raise NotImplementedError(
            f"precompile: parameter {spec.fqn} is checked (Plan(check='checksums')), and checksums "
            "find their unit by a number of this process. Compile with check=None"
        )
    for group in (spec.group, spec.reduce_group, spec.post_group, spec.replicate_group):
        if group and not is_common(group):
            raise NotImplementedError(
                f"precompile: parameter {spec.fqn} is communicated over the process group "
                f"{group!r}, and each rank numbers its groups for itself. Shard over a mesh of "
                "all ranks, or a part of one"
            )
    values = asdict(spec)
    for name in ("unit", "forward_after", "backward_after"):
        values[name] = re.sub(r"#\d+", "", str(values[name]))
    return {name: str(value) for name, value in values.items()}


def ignored(model: nn.Module) -> Iterable[tuple[str, Any]]:
    """Parameters of a sharded model that no unit has, each by its first name."""
    seen: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        owned = module.__dict__.get("_fsdp_handles", {})
        for name, param in module._parameters.items():
            if param is not None and name not in owned:
                seen.setdefault(id(param), (f"{path}.{name}" if path else name, param))
    return seen.values()


def trained(*, requires_grad: bool) -> str:
    """Words for it."""
    return "" if requires_grad else ", frozen"


def differences(made_for: dict[str, Any], here: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By name, what something was made for and what is here, where these differ."""
    return {
        name: (str(made_for.get(name, MISSING)), str(here.get(name, MISSING)))
        for name in (*made_for, *(n for n in here if n not in made_for))
        if not _is_same(name, made_for.get(name, MISSING), here.get(name, MISSING))
    }


def _is_same(name: str, made_for: Any, here: Any) -> bool:
    if not name.startswith(ORDER) or here in (MISSING, None):
        return bool(made_for == here)
    if made_for == MISSING:
        return True  # modules that were not there are not called
    names: list[str] = made_for.split(", ")
    there: list[str] = here.split(", ")
    return [each for each in there if each in names] == names


def mismatch(what: str, found: dict[str, tuple[str, str]], advice: str) -> PrecompiledError:
    """An error that lists everything that differs."""
    lines = [f"  {name}: {before}, here {here}" for name, (before, here) in found.items()]
    return PrecompiledError("\n".join([what, *lines, advice]), found)
