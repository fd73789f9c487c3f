"""CUDA graphs of whole steps: what a device does in one is captured once, and replayed with no
Python between.

Inductor's own CUDA graphs do not hold a whole step: they take it for a forward whose backward is
still to come, and record it anew behind itself; they are cut at every op that calls the host, as
the updates are; and what an optimizer remembers is no input, so that nobody would notice when it
moves. So they are off, and the function that a backend has made of a graph is called through
`captured`, behind Dynamo's guards. Of inputs of one kind (shapes, and addresses of all that is no
batch) the first run is an ordinary one, the second is captured, and that and all others are
replayed, while all that the host would do in another way now is as it was. If it is not, the next
run is an ordinary one again, and the one behind it captured.

[Note: the host's part of a captured step]
What a kernel has to do on the host in each run, it hands to `each_run`. An ordinary run does it at
once and remembers it; capturing leaves it out; before each replay it is done from what is
remembered. All else that a kernel does on the host is done when it is captured, and never again.

Tests put a double in the place of `CudaGraphs`, which needs no device: it writes down the ops on
tensors, and replays them on the same memory.

Private torch used here (tried on 2.13): `TorchDispatchMode`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.schema import traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Action = Callable[[], object]
    Function = Callable[..., Any]
    Signature = Mapping[tuple[str, str, int], object]  # by what, of what, and which

MOST_KINDS = 64  # of inputs, whose ordinary run is remembered
MOST_CAPTURED = 16  # of them
PATIENCE = 8  # runs in a row that were not replayed, before that is announced


class CudaGraphs:
    """What captures, on a device of CUDA's: graphs that share their memory, since nothing outlives
    a replay but what is copied behind it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Action]:
        """What the function returns, which the device has yet to compute, and what lets it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found = function()
        return found, graph.replay

    def settle(self) -> None:
        """Wait until nothing is replayed any more, before a graph goes."""
        torch.cuda.synchronize()


# By type of device.
RECORDERS: dict[str, Callable[[], Any]] = {"cuda": CudaGraphs}


@dataclass(eq=False)
class Kind:
    """Inputs of one kind, of one graph.

    signature: behind the last run.
    actions: the host's part of each run.
    batch: places of the inputs that differ from run to run, which are copied.
    why_not: why no run is captured.
    inputs: with which one was captured.
    outputs: that a replay writes to.
    replay: None: none was captured yet.
    """

    signature: Signature
    actions: list[Action] = field(default_factory=list)
    batch: tuple[int, ...] = ()
    why_not: str = ""
    inputs: list[Any] = field(default_factory=list)
    outputs: Any = None
    replay: Action | None = None

    def forget(self) -> None:
        """Let go of what was captured, and of its memory."""
        self.replay = self.outputs = None
        self.inputs.clear()


class Captures:
    """The captured runs of one whole step.

    mode: the user's, for errors.
    batch: the identities of the tensors that the running step was called with.
    signature: all that the host decides from in an update.
    """

    def __init__(self, mode: str, device: torch.device, signature: Callable[[], Signature]) -> None:
        self.mode, self.device = mode, device
        self.batch: set[int] = set()
        self.num_replays = 0
        self._signature = signature
        self._recorder = RECORDERS[device.type]()
        self._captured: WeakSet[Kind] = WeakSet()
        self._num_ordinary = 0
        self._last: tuple[object, ...] | None = None

    def call(self, function: Function, kinds: dict[Any, Kind], args: Sequence[Any]) -> Any:
        """Run a graph with these inputs."""
        key = tuple(self._kind_of(arg) for arg in args)
        if why := next((part[1] for part in key if part[0] == "not"), ""):
            return self._plain(function, args, str(why))
        kind, now = kinds.get(key), self._signature()
        why = _changed(self._last, key) if kind is None else _differing(kind.signature, now)
        self._last = key
        if kind is None or why:
            return self._ordinary(function, kinds, key, args, why)
        if kind.why_not:
            return self._plain(function, args, kind.why_not)
        if kind.replay is None and len(self._captured) == MOST_CAPTURED:
            return self._plain(function, args, f"{MOST_CAPTURED} kinds of inputs were captured")
        for action in kind.actions:
            action()
        if kind.replay is None:
            self._capture(function, kind, args)
        else:
            for place in kind.batch:
                kind.inputs[place].copy_(args[place], non_blocking=True)
        assert kind.replay is not None
        kind.replay()
        self.num_replays += 1
        self._num_ordinary = 0
        return _each(kind.outputs, torch.clone)

    def _plain(self, function: Function, args: Sequence[Any], why: str) -> Any:
        self._note_ordinary(why)
        return function(*args)

    def _note_ordinary(self, why: str) -> None:
        self._num_ordinary += 1
        if self._num_ordinary == PATIENCE:
            warn_once(
                f"compile_step(mode={self.mode!r}): {PATIENCE} steps in a row were run as with "
                f"mode=None, not replayed, the last because {why}. Pass what changes from step to "
                "step as tensors among the arguments of step(...), in lists or dicts if need be, "
                "of few different shapes; let hyperparameters that change be tensors on the "
                "device, which are written to (lr=torch.tensor(1e-3, device='cuda'), "
                "group['lr'].fill_(...))",
                about=f"not replayed: {why}",
            )

    def _kind_of(self, arg: Any) -> tuple[object, ...]:
        """What has to be the same of an input; of what differs from run to run its layout."""
        if not isinstance(arg, Tensor):
            is_plain = arg is None or isinstance(arg, bool | int | float | str)
            return ("value", type(arg), arg) if is_plain else _not(f"one is a {type(arg).__name__}")
        if type(arg) not in (Tensor, nn.Parameter):
            return _not(f"an input is a {type(arg).__name__}")
        layout = (arg.dtype, tuple(arg.shape), arg.stride(), arg.requires_grad)
        if arg.device.type != self.device.type:
            if arg.numel() == 1:
                return "number", *layout, arg.item()
            return _not(f"an input of shape {tuple(arg.shape)} is on {arg.device}")
        if id(arg) not in self.batch:
            return "fixed", *layout, arg.device, arg.data_ptr()
        if any(step == 0 and size > 1 for size, step in zip(arg.shape, arg.stride(), strict=True)):
            return _not(f"an argument of shape {tuple(arg.shape)} is expanded (call .contiguous())")
        return "batch", *layout, arg.device

    def _ordinary(
        self,
        function: Function,
        kinds: dict[Any, Kind],
        key: tuple[Any, ...],
        args: Sequence[Any],
        why: str,
    ) -> Any:
        """A run as it is, which remembers the host's part."""
        self._note_ordinary(why)
        old = kinds.pop(key, None)
        if old is not None and old.replay is not None:
            self._recorder.settle()
            old.forget()
        kind = Kind({}, batch=tuple(i for i, part in enumerate(key) if part[0] == "batch"))
        before = [] if old is not None else [(args[i], args[i].clone()) for i in kind.batch]
        with _remembering(kind.actions):
            found = function(*args)
        kind.why_not = self._why_not(before, found) if old is None else old.why_not
        kind.signature = self._signature()
        unused = [other for other, each in kinds.items() if each.replay is None]
        if len(unused) >= MOST_KINDS:
            del kinds[unused[0]]
        kinds[key] = kind
        return found

    def _why_not(self, before: Sequence[tuple[Tensor, Tensor]], found: Any) -> str:
        for given, copied in before:
            if not bool(((given == copied) | (given != given)).all()):
                return (
                    f"the step writes to an argument of shape {tuple(given.shape)}; let it write "
                    "to a copy (x.clone())"
                )
        for each in found:
            if isinstance(each, Tensor) and each.device.type != self.device.type:
                return (
                    f"loss_fn returns a tensor of shape {tuple(each.shape)} on {each.device}; let "
                    "it return what it has on the device"
                )
        return ""

    def _capture(self, function: Function, kind: Kind, args: Sequence[Any]) -> None:
        """Capture a run: nothing is computed yet."""
        inputs = list(args)
        for place in kind.batch:
            inputs[place] = torch.empty_strided(
                args[place].shape,
                args[place].stride(),
                dtype=args[place].dtype,
                device=args[place].device,
            ).copy_(args[place])
        before = self._signature()

        def run() -> Any:
            with on_device(self.device):
                return function(*inputs)

        try:
            with _capturing(self.device):
                found, kind.replay = self._recorder.capture(run)
        except Exception as error:
            raise NotImplementedError(f"{self._refusal()}: {_said(error)}") from error
        if why := _differing(before, self._signature()):
            raise NotImplementedError(f"{self._refusal()}: {why} by the step itself, on the host")
        kind.inputs, kind.outputs = inputs, _each(found, Tensor.detach)
        self._captured.add(kind)

    def _refusal(self) -> str:
        return (
            f"compile_step(mode={self.mode!r}): the step cannot be a CUDA graph (leave mode out, "
            "or give mode='max-autotune-no-cudagraphs')"
        )


def _said(error: Exception) -> str:
    """The first line of what went wrong first: to end a capture that has failed may fail, too."""
    both = [error, *([error.__context__] if error.__context__ is not None else [])]
    first = next((each for each in both if isinstance(each, Refused)), both[-1])
    return (str(first).strip() or type(first).__name__).splitlines()[0]


def _each(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return type(outputs)(change(each) if isinstance(each, Tensor) else each for each in outputs)


def _not(why: str) -> tuple[str, str]:
    return "not", why


def _changed(before: tuple[Any, ...] | None, now: tuple[Any, ...]) -> str:
    """How the kind of the inputs differs from that of the run before."""
    if before is None or len(before) != len(now):
        return "it is the first of its graph"
    for old, new in zip(before, now, strict=True):
        if old != new:
            if new[0] == "fixed":
                return f"a tensor of shape {new[2]} that is no argument of step(...) is another one"
            if new[0] in ("value", "number"):
                return f"a number is {new[-1]}, and was {old[-1]}"
            return f"an argument has the shape {new[2]}, and another one before"
    return "it is the first of its graph"


def _differing(before: Signature, now: Signature) -> str:
    """What the host would decide from now that is not as it was; "" if nothing."""
    if before == now:
        return ""
    names = [name for name in now if before.get(name, _differing) != now[name]]
    names += [name for name in before if name not in now]
    what, place, _ = names[0]
    old, new = before.get(names[0]), now.get(names[0])
    is_shown = isinstance(old, float | int | bool) and isinstance(new, float | int | bool)
    return f"{what} of {place} changed" + (f" from {old} to {new}" if is_shown else "")


# By the name of the step.
CAPTURES: WeakValueDictionary[str, Captures] = WeakValueDictionary()


def captured(step: str, function: Function) -> Function:
    """The function that a backend has made of a graph of the whole step of this name, replayed
    where it can be.
    """
    kinds: dict[Any, Kind] = {}

    def run(*args: Any) -> Any:
        captures = CAPTURES.get(step)
        return function(*args) if captures is None else captures.call(function, kinds, args)

    return run


# -- the host's part

_remembered: list[Action] | None = None
_capturing_on: torch.device | None = None


def each_run(action: Action) -> None:
    """Let the host do this in each run of the graph whose kernel calls; see [Note: the host's part
    of a captured step].
    """
    if _capturing_on is not None:
        return
    action()
    if _remembered is not None:
        _remembered.append(action)


@contextmanager
def _remembering(actions: list[Action]) -> Iterator[None]:
    global _remembered
    _remembered = actions
    try:
        yield
    finally:
        _remembered = None


@contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    global _capturing_on
    _capturing_on = device
    try:
        yield
    finally:
        _capturing_on = None


class Refused(Exception):  # `Captures` makes an error of it
    """An op that no CUDA graph may hold."""


class OnDevice(TorchDispatchMode):
    """Raises at what would be done once, when it is captured, and not in replays: values that are
    read on the host, tensors elsewhere, ops that call the host.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an op, and run it."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it makes of it comes here
        kwargs = kwargs or {}
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags:
            raise Refused(f"{func} reads a value on the host")
        if torch.Tag.cudagraph_unsafe in tags and not traits_of(func).is_replayed:
            raise Refused(f"{func} calls the host in each run")
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.device.type != self.device.type:
                raise Refused(
                    f"{func} takes a tensor of shape {tuple(each.shape)} on {each.device}"
                )
        return func(*args, **kwargs)


def on_device(device: torch.device | None = None) -> AbstractContextManager[object]:
    """Look at each op inside; None: on the device that a step is captured on, if one is. A kernel's
    own ops are looked at where it asks for it.
    """
    device = device or _capturing_on
    return nullcontext() if device is None else OnDevice(device)
