"""Compiles one call of a model, as one rank of many, and keeps what another process needs to make
that call without a compiler. Nothing is computed: the compiled graph answers with empty tensors.

Private torch used here (tried on 2.13): `torch.utils._pytree`, `torch._inductor.compile_fx`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node
from torch.utils._pytree import tree_flatten, treespec_dumps

from compiled_fsdp.compiler.backend import compiled_fsdp, without_inductor
from compiled_fsdp.compiler.driver import run_half
from compiled_fsdp.ir.collectives import group_of
from compiled_fsdp.ir.graph import placeholders, starts
from compiled_fsdp.ir.meta import traced_value
from compiled_fsdp.torch_private import ahead as private
from compiled_fsdp.torch_private.groups import is_common
from compiled_fsdp.torch_private.ranks import mesh_in_words

from . import facts as of_code
from .code import keep_graph, keep_inductor
from .program import MESH, SIZE, Program
from .sizes import checker, described, in_words
from .target import EAGER_BACKEND, INDUCTOR_BACKEND, ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.fx import GraphModule

    from compiled_fsdp.torch_private.ahead import Calling, Sizes
    from compiled_fsdp.units.unit import Unit

    from .program import Half


def refuse(what: str, why: str) -> NotImplementedError:
    """The error for a model that cannot be compiled ahead."""
    return NotImplementedError(
        f"precompile: {what}: {why}. This is not supported ahead; compile it with torch.compile"
    )


@dataclass(frozen=True)
class Call:
    """A call of a model that is to be compiled.

    example: its arguments, positional ones and those by name.
    mode: "training" or "inference".
    """

    model: nn.Module
    units: Sequence[Unit]
    example: tuple[tuple[Any, ...], dict[str, Any]]
    mode: str
    backend: str


@dataclass(eq=False)
class Capture:
    """What is seen while one call is compiled.

    name: of the files; "": graphs are only looked at, and nothing is compiled or kept.
    graphs: the code of both halves, before our passes;
        `groups` are those that the user's part of it communicates over.
    halves: forward, and backward if there is one, with the number of inputs of each.
    gradients: for each input, whether backward gives it a gradient.
    used: places of the inputs that forward reads.
    sizes: what is known, in the end, of their sizes.
    inputs, outputs: the very tensors that the compiled graph was given, and has returned.
    """

    name: str
    backend: str
    files: dict[str, bytes] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)
    calling: Calling | None = None
    gradients: list[bool] = field(default_factory=list)
    guarded: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    sizes: Callable[[], Sizes | None] = lambda: None
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    refused: NotImplementedError | None = None

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        """Be Dynamo's backend, which wraps errors in its own."""
        try:
            return self._compile(gm, inputs)
        except NotImplementedError as error:
            self.refused = error
            raise

    def _compile(self, gm: GraphModule, inputs: list[Any]) -> Any:
        changed = private.changed_objects()
        if changed:
            raise refuse(
                "forward assigns to objects that outlive it", ", ".join(sorted(set(changed)))
            )
        self.guarded = private.guarded()
        self.sources = of_code.sources(private.traced_code())
        values = [traced_value(n) if isinstance(n, Node) else n for n in _returned(gm)]
        known = torch.Tensor | DeviceMesh | torch.SymInt
        self.sizes = private.sizes_of([traced_value(n) for n in placeholders(gm.graph)])
        others = [type(v).__name__ for v in values if not isinstance(v, torch.Tensor)]
        others += [type(v).__name__ for v in inputs if not isinstance(v, known)]
        if others:
            names = ", ".join(dict.fromkeys(others))
            raise refuse("the graph takes or returns what is no tensor", names)
        if self.backend == EAGER_BACKEND:
            without_inductor(gm, inputs, self._half)
        else:
            compiled_fsdp(gm, inputs, inner_compile=self._inner_compile)

        def run(*args: Any) -> list[torch.Tensor]:
            self.inputs = list(args)
            self.outputs = [
                torch.empty(private.shape_of_example(v), dtype=v.dtype, device="meta")
                for v in values
            ]
            return list(self.outputs)

        return run

    def _half(self, gm: GraphModule, inputs: Any) -> Any:
        self._note(gm)
        if not self.name:
            return _not_run
        gm = run_half(gm)
        half, run = keep_graph(gm, f"{self.name}.{len(self.halves)}", self.files)
        self.halves.append(half)
        return run

    def _inner_compile(self, gm: GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        self._note(gm)
        if not self.name:
            return _not_run
        compiled = compile_fx_inner(gm, inputs, **options)
        self.halves.append(keep_inductor(compiled, f"{self.name}.{len(self.halves)}", self.files))
        return compiled

    def _note(self, gm: GraphModule) -> None:
        """A half, before it is compiled."""
        self.graphs.append(private.graph_text(gm))
        self._note_groups(gm)
        if len(self.graphs) == 1:
            calling, why = private.calling(len(list(placeholders(gm.graph))))
            if calling is None:
                raise refuse("forward", why)
            is_reused = calling.is_donated and self.backend == INDUCTOR_BACKEND
            self.calling = replace(calling, is_donated=is_reused)  # only Inductor plans memory
            self.used = [i for i, n in enumerate(placeholders(gm.graph)) if n.users]
            return
        self.gradients = [grad is not None for grad in _returned(gm)]

    def _note_groups(self, gm: GraphModule) -> None:
        for name in map(group_of, starts(gm.graph)):
            if not is_common(name):
                raise refuse(
                    f"forward communicates over the process group {name!r}",
                    "each rank numbers its groups for itself. Take the group from a DeviceMesh of "
                    "all ranks that a parameter is on",
                )
            if name not in self.groups:
                self.groups.append(name)


def _not_run(*_: Any) -> Any:
    raise AssertionError("a graph that was only looked at was called")


def _returned(gm: GraphModule) -> list[Any]:
    returned: Any = gm.graph.output_node().args[0]
    return list(returned)


def graphs(call: Call) -> list[str]:
    """The code of both halves, before our passes; nothing is compiled."""
    return _traced(call, "")[0].graphs


def _traced(call: Call, name: str) -> tuple[Capture, Any]:
    seen = Capture(name, call.backend)
    compiled = torch.compile(call.model, backend=seen, fullgraph=True, dynamic=False)
    with private.compiling_ahead(), torch.set_grad_enabled(call.mode == "training"):
        try:
            return seen, compiled(*call.example[0], **call.example[1])
        except Exception:
            if seen.refused is not None:
                raise seen.refused from None
            raise


def capture(call: Call, name: str, files: dict[str, bytes]) -> tuple[Program, Capture]:
    """Compile a call, and put what runs it into `files`; returns it, and what was seen of it."""
    model, mode = call.model, call.mode
    leaves, nesting = tree_flatten(call.example)
    seen, result = _traced(call, name)
    files |= seen.files
    if not seen.halves or seen.calling is None:
        raise refuse("forward", "it computes nothing")
    if mode == "training" and len(seen.halves) == 1:
        raise ValueError(
            "precompile: no output of the model requires a gradient, so there is no backward for "
            "training. Unfreeze a parameter, or pass Target(modes=('inference',))"
        )
    sizes = seen.sizes()
    inputs = _places(model, call.units, leaves, seen, sizes)
    for i in (*seen.calling.changed, *seen.calling.written):
        if inputs[i][0] == "input":
            raise refuse(f"forward writes to its input {inputs[i][1]}", "only buffers may change")
    result_leaves, result_nesting = tree_flatten(result)
    facts, unknown = of_code.facts(seen.guarded, model)
    if unknown:
        raise refuse("forward looks at what cannot be looked up again", ", ".join(unknown))
    program = Program(
        mode=mode,
        inputs=inputs,
        arguments=str(nesting),
        leaves=_described(leaves, inputs, sizes),
        nesting=_dumped(result_nesting),
        results=[_result(leaf, leaves, seen) for leaf in result_leaves],
        units=[unit.key for unit in call.units],
        calling=seen.calling,
        detached=[
            i
            for i, has in enumerate(seen.gradients[: len(inputs)])
            if not has and inputs[i][0] not in (MESH, SIZE)
        ],
        forward=seen.halves[0],
        backward=seen.halves[1] if len(seen.halves) > 1 else None,
        facts=facts,
        guards=sizes.guards if sizes else [],
        groups=seen.groups,
        ranks=[],
    )
    return program, seen


def _dumped(nesting: Any) -> str:
    try:
        return treespec_dumps(nesting)
    except NotImplementedError as error:
        raise refuse("what forward returns cannot be written down", str(error)) from error


def describe_leaf(leaf: Any) -> dict[str, Any]:
    """A leaf of the arguments: of a tensor its layout, else the value as text."""
    if not isinstance(leaf, torch.Tensor):
        return {"value": repr(leaf)}
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    return {
        "class": "Tensor" if type(leaf) is torch.nn.Parameter else type(leaf).__name__,
        "shape": list(leaf.shape),
        "stride": [stride if size > 1 else 0 for size, stride in sizes],
        "dtype": str(leaf.dtype),
        "device": leaf.device.type,
        "requires_grad": leaf.requires_grad,
    }


def _described(
    leaves: list[Any], inputs: list[list[Any]], sizes: Sizes | None
) -> list[dict[str, Any]]:
    found = [describe_leaf(leaf) for leaf in leaves]
    if sizes is None:
        return found
    try:
        checker(sizes.guards)
    except ValueError as error:
        raise refuse("sizes of arguments", str(error)) from error
    words = in_words(sizes)
    for place, shape in zip(inputs, sizes.names, strict=True):
        if place[0] == "input" and not isinstance(shape, str):
            number = place[1]
            found[number] = described(found[number], leaves[number], shape, words)
    return found


def _places(
    model: nn.Module,
    units: Sequence[Unit],
    leaves: list[Any],
    seen: Capture,
    sizes: Sizes | None,
) -> list[list[Any]]:
    """Of each input of the graph, where it comes from."""
    known: dict[int, list[Any]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in known:
                raise refuse("the example", "the same tensor is given twice; give copies")
            known[id(leaf)] = ["input", number]
    known |= {id(p): ["parameter", name] for name, p in ignored(model)}
    known |= {id(b): ["buffer", name] for name, b in model.named_buffers()}
    for number, unit in enumerate(units):
        known |= {id(flat.data): ["flat", number, i] for i, flat in enumerate(unit.flats)}
    found: list[list[Any]] = []
    for place, tensor in enumerate(seen.inputs):
        if isinstance(tensor, int):
            found.append(_place_of_size(place, sizes, seen, known))
            continue
        if isinstance(tensor, DeviceMesh):
            if place in seen.used:
                raise refuse("forward computes with a DeviceMesh", mesh_in_words(tensor))
            found.append([MESH, mesh_in_words(tensor)])
            continue
        if id(tensor) not in known:
            raise refuse(
                f"the graph reads a {type(tensor).__name__} of shape {tuple(tensor.shape)}",
                "it is no argument, buffer or parameter of the model",
            )
        found.append(known[id(tensor)])
    return found


def _place_of_size(
    place: int, sizes: Sizes | None, seen: Capture, known: dict[int, list[Any]]
) -> list[Any]:
    """The argument that has this size, and its dim."""
    symbol = sizes.names[place] if sizes else None
    for tensor, shape in zip(seen.inputs, sizes.names if sizes else (), strict=False):
        if not isinstance(shape, str) and symbol in shape and known[id(tensor)][0] == "input":
            return [SIZE, known[id(tensor)][1], shape.index(symbol)]
    raise refuse(f"the graph takes the size {symbol}", "it is no argument's")


def _result(leaf: Any, leaves: list[Any], seen: Capture) -> list[Any]:
    for kind, tensors in (("output", seen.outputs), ("input", leaves)):
        for number, tensor in enumerate(tensors):
            if isinstance(leaf, torch.Tensor) and tensor is leaf:
                return [kind, number]
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return ["value", leaf]
    raise refuse(
        f"forward returns a {type(leaf).__name__}", "it is no tensor of the graph or plain value"
    )
