"""The code of a half: kept while it is compiled, and run from what was kept.

Private torch used here (tried on 2.13): `torch._dynamo.backends.debugging.boxed_nop`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.debugging import boxed_nop

from compiled_fsdp.torch_private import ahead as private

from .program import FX, INDUCTOR, Constant, Half

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.fx import GraphModule

# What the code of a graph may take from outside.
NAMES: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
    "NoneType": type(None),
}
UNUSED = ("fx_pytree", "pytree")  # there in every graph, for arguments that are nested
# The one line by which Inductor's code comes to a compiler.
BUILDER = "from torch._inductor.async_compile import AsyncCompile\n"


def keep_graph(gm: GraphModule, name: str, files: dict[str, bytes]) -> tuple[Half, Any]:
    """Put the code of a graph, and its constants, into `files`; returns what to know of it, and
    what runs it now.

    Raises:
        NotImplementedError: it needs something that is no tensor or plain value.
    """
    run = boxed_nop(gm, [])  # gives the code the form in which it takes a list of inputs
    source, names = private.graph_source(gm)
    unknown = sorted(n for n in names - NAMES.keys() if not n.startswith(UNUSED))
    constants = {n: _attribute(gm, n) for n in private.attributes(gm.graph)}
    unknown += [n for n, v in constants.items() if "." in n or not isinstance(v, torch.Tensor)]
    if unknown:
        raise NotImplementedError(
            f"precompile: the {name} graph needs {', '.join(unknown)}, which cannot be written "
            "down as tensors and plain values"
        )
    files[f"{name}.py"] = source.strip().encode() + b"\n"
    return Half(FX, f"{name}.py", [], _keep(constants, name, files)), run


def _attribute(gm: Any, name: str) -> Any:
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm


class Builder:
    """What Inductor's code gets instead of a compiler: C++ kernels, in the order of the code.

    take: makes the next kernel, of what the code says of it.
    """

    def __init__(self, take: Callable[..., Any]) -> None:
        self.cpp_pybinding = take

    def wait(self, scope: dict[str, Any]) -> None:
        """All kernels are there."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"precompile: Inductor generated a kernel of the kind {name!r}; only those in C++ "
            "for the CPU can be compiled ahead so far"
        )


def keep_inductor(compiled: Any, name: str, files: dict[str, bytes]) -> Half:
    """Put the code that Inductor generated, its kernels as shared libraries, and its constants into
    `files`.

    Raises:
        NotImplementedError: it needs something else.
    """
    source, constants = private.inductor_source(compiled)
    if source.count(BUILDER) != 1:
        raise NotImplementedError(f"precompile: the code of the {name} graph has no {BUILDER!r}")
    kernels: list[str] = []

    def take(*args: Any, **options: Any) -> Any:
        kernel = private.compiled_kernel(*args, **options)
        file = f"{name}.{len(kernels)}.so"
        files[file] = Path(private.library_of(kernel)).read_bytes()
        kernels.append(file)
        return kernel

    source = source.replace(BUILDER, "")
    # Made by Inductor just now.
    exec(compile(source, name, "exec"), {"AsyncCompile": lambda: Builder(take)})
    files[f"{name}.py"] = source.encode()
    return Half(INDUCTOR, f"{name}.py", kernels, _keep(constants, name, files))


def _keep(constants: dict[str, Tensor], name: str, files: dict[str, bytes]) -> list[Constant]:
    kept = []
    for number, (attribute, tensor) in enumerate(constants.items()):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise NotImplementedError(
                f"precompile: constant {attribute} is a tensor on {tensor.device}; should be a "
                "dense one on the CPU"
            )
        file = f"{name}.constant{number}"
        files[file], stride = private.kept(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        kept.append(Constant(attribute, file, dtype, list(tensor.shape), stride))
    return kept


# -- run


class Libraries:
    """A private folder for the shared libraries of a model, with what was checked of them; it is
    needed only until they are loaded.
    """

    def __init__(self, digest: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="compiled_fsdp_")
        self.digest = digest

    def __enter__(self) -> Libraries:
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()

    def load(self, file: str, content: bytes) -> Any:
        """The kernel in a library."""
        path = Path(self.folder.name) / file
        path.write_bytes(content)
        name = f"compiled_fsdp_ahead_{self.digest}_{re.sub(r'[^a-z0-9]', '_', file)}.kernel"
        return private.loaded_kernel(name, str(path))


def load(
    half: Half, files: dict[str, bytes], renamed: Callable[[str], str], libraries: Libraries
) -> Callable[[list[Any]], Any]:
    """What runs a half: a function of the list of its inputs, which it empties.

    renamed: the code, with units called as in this process.
    """
    source = renamed(files[half.file].decode())
    constants = {c.name: _constant(c, files) for c in half.constants}
    if half.kind == FX:
        scope: dict[str, Any] = dict(NAMES)
        exec(compile(source, half.file, "exec"), scope)  # its hash was checked
        module = _Attributes(constants)
        forward = scope["forward"]
        return lambda args: forward(module, args)
    kernels = iter(half.kernels)

    def take(*_: Any, **options: Any) -> Any:
        file = next(kernels)
        return libraries.load(file, files[file])

    scope = {"AsyncCompile": lambda: Builder(take)}
    exec(compile(source, half.file, "exec"), scope)  # its hash was checked
    scope.update(constants)
    call: Callable[[list[Any]], Any] = scope["call"]
    return call


class _Attributes:
    """What stands for a graph's module."""

    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def _constant(constant: Constant, files: dict[str, bytes]) -> Tensor:
    dtype: torch.dtype = getattr(torch, constant.dtype)
    content = files[constant.file]
    plain = (
        torch.frombuffer(bytearray(content), dtype=dtype)
        if content
        else torch.empty(0, dtype=dtype)
    ).reshape(constant.shape)
    made = torch.empty_strided(constant.shape, constant.stride, dtype=dtype)
    return made.copy_(plain)
