"""The settings of one parameter's communication, as plain values, which an op has as one argument.

The last argument of `fsdp::unshard` is a `ParamSpec`, as text. Everything that a pass decides from
stands in it, so a graph can be cached, dumped, written by hand in a test and read by a person
without any registry; and as one argument, since torch's compiler looks at each argument of each
node many times.
"""

from __future__ import annotations

import ast
import hashlib
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from .keys import Brought, Keys

if TYPE_CHECKING:
    from collections.abc import Sequence


# A parameter of fewer bytes shares a message with its neighbours and is copied out; a larger one
# travels by itself.
OWN_MESSAGE = 1 << 18

MEAN = "mean:"  # before a hook's key
IN_BACKWARD = "backward"  # `ParamSpec.overlap`
NEXT = "next"  # `ParamSpec.overlap`
AGAIN = "again"  # `ParamSpec.reshard`

# What users gave us to call (custom communications, all-reduce hooks), by the key that stands in an
# op's arguments; the units that they were given to keep it.
REGISTRY = Brought()


@dataclass(frozen=True, slots=True)
class Reduction:
    """How a gradient is reduced: `(sum or mean)(grad / pre_divide) / post_divide`, in `dtype`.

    dtype: what travels on the wire and is summed.
    op: "sum" or "avg"; NCCL averages on the device, other backends get a sum and an explicit
        division.
    algorithm: "reduce_scatter", or "all_to_all" (all-to-all, then a local sum in rank order): half
        the bytes on gloo, whose reduce-scatter moves what an all-reduce moves; or "custom:KEY", a
        user's communication in `REGISTRY`.
    replicate_size, replicate_group: the all-reduce over HSDP's replicate axis; size 1 means none.
    sync: "reduce"; "retain" keeps the unreduced gradient for a later backward; "scatter" (HSDP)
        keeps the one that is reduced over the shard axis only.
    is_accumulating: earlier backwards may have left retained gradients, which this one adds first.
    hook: key in `REGISTRY` of what sees the flat result before the last division, or after it
        ("mean:KEY"); "" for none.
    retained_dtype: in which unreduced gradients are kept and added up, before they are cast to
        `dtype`; None: in `dtype`.
    """

    dtype: torch.dtype
    op: str = "sum"
    algorithm: str = "reduce_scatter"
    pre_divide: float = 1.0
    post_divide: float = 1.0
    replicate_size: int = 1
    replicate_group: str = ""
    sync: str = "reduce"
    is_accumulating: bool = False
    hook: str = ""
    retained_dtype: torch.dtype | None = None

    @property
    def first_dtype(self) -> torch.dtype:
        """Returns what a gradient is cast to first: `retained_dtype` where it is kept, or added to
        what was.
        """
        if self.retained_dtype is not None and (self.sync == "retain" or self.is_accumulating):
            return self.retained_dtype
        return self.dtype


@cache  # asked for every parameter of a bucket, for each of them
def _shard_numel(shape: tuple[int, ...], dim: int, group_size: int) -> int:
    return max(1, -(-shape[dim] // group_size)) * prod(shape[:dim]) * prod(shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """How a parameter is gathered and its gradient reduced; sizes in elements, not bytes.

    offset: where this parameter's padded shard begins in the unit's flat local buffer.
    shape: global shape of the parameter.
    dim: the dimension that is sharded; only dim 0 may be uneven.
    dtype: of the unsharded parameter, and of the all-gather.
    group_size, group: the shard axis' process group, by name.
    gather_algorithm: "" (all-gather) or "custom:KEY".
    reduce_group: the group of the reduction over the shard axis; the same ranks.
    reshard: "gather" (drop after forward, gather again in backward), "keep" (no second gather), or
        "slice" (keep a 1/post_size slice and gather that over `post_group`); AGAIN: this is the
        second gather, in the graph of a whole step, which has both.
    reduce_*, pre_divide, post_divide, replicate_*, sync, is_accumulating, hook, retained_dtype: see
        `Reduction`.
    overlap: "step": the optimizer's step may overlap with the last reductions and the first
        gathers; IN_BACKWARD: backward itself steps what it has reduced; NEXT: the graph of a whole
        step gathers it for the next one, once it is updated; "": none of that. See
        `frontend/overlap.py`.
    unit, fqn: names for people; `unit` also says which collectives may share a bucket.
    reduces_in_flight: reductions that may be under way at once; 0 leaves it to the plan.
    forward_after, backward_after: units whose explicit prefetch lists name this one, "" for the
        outermost; empty leaves the start of the all-gather to the plan.
    own_message: a full parameter of fewer bytes shares a message with its neighbours and is copied
        out.
    forward_ahead, backward_ahead: how many units ahead of its use the all-gather may start at most;
        negative: as the plan says.
    device: the type of the device that computes, where the shard rests in host memory instead (CPU
        offload), pinned if `pins`; "": the shard is where computation is.
    gather_quantized: the dtype of the codes that travel when the parameter is gathered
        (`quantized.py`); None: it travels as it is.
    reduce_quantized: the same of its gradient, when it is sent to the ranks that reduce it.
    batch: the micro-batch that it is gathered or reduced for, in the graph of a whole step that has
        several; 0 also where it is for all of them.
    is_checked: whether ranks compare checksums of what travels of it (`checksums.py`).
    is_extended: whether this is not the parameter, but one of the tensors that its all-gather
        extension gathers (`units/traced_extension.py`).
    grad_dtype: in which its reduced gradient is kept; None: in that of the flat buffer.
    keeps_wide: whether a gradient that autograd yields in a wider dtype than `dtype` (activations
        in fp32 times weights in bf16) goes to its reduction as it is, not rounded to `dtype`.
    adds_wide: whether gradients of several reads are added in `sum_dtype`, not as they come.
    """

    offset: int
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    group_size: int
    group: str
    gather_algorithm: str
    reduce_group: str
    reshard: str
    post_size: int
    post_group: str
    reduce_dtype: torch.dtype
    reduce_op: str
    reduce_algorithm: str
    pre_divide: float
    post_divide: float
    replicate_size: int
    replicate_group: str
    sync: str
    is_accumulating: bool
    hook: str
    overlap: str
    unit: str
    fqn: str
    reduces_in_flight: int = 0
    forward_after: tuple[str, ...] = ()
    backward_after: tuple[str, ...] = ()
    own_message: int = OWN_MESSAGE
    forward_ahead: float = -1.0
    backward_ahead: float = -1.0
    retained_dtype: torch.dtype | None = None
    device: str = ""
    pins: bool = False
    gather_quantized: torch.dtype | None = None
    reduce_quantized: torch.dtype | None = None
    batch: int = 0
    is_checked: bool = False
    is_extended: bool = False
    grad_dtype: torch.dtype | None = None
    keeps_wide: bool = False
    adds_wide: bool = False

    @classmethod
    def of(cls, args: Sequence[Any]) -> ParamSpec:
        """From the arguments of an op or node behind its tensors: one, the text.

        Raises:
            ValueError: it is none.
        """
        if len(args) != 1 or not isinstance(args[0], str):
            raise ValueError(
                f"ParamSpec.of: got {tuple(args)}; should be one argument, a ParamSpec as text "
                "(ParamSpec.args())"
            )
        return _read(args[0])

    def args(self) -> tuple[str]:
        """What an op has of it: one argument, the text."""
        return (_write(self),)

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> ParamSpec:
        """From the values of its fields, in order.

        Raises:
            ValueError: there are more or fewer.
        """
        if len(values) != len(fields(cls)):
            raise ValueError(
                f"ParamSpec.of_values: got {len(values)} values {tuple(values)}; a ParamSpec has "
                f"{len(fields(cls))}: {[f.name for f in fields(cls)]}"
            )
        given: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
        return cls(*given)

    def values(self) -> tuple[object, ...]:
        """The values of its fields, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    def key(self) -> str:
        """Returns what a traced read names it by; the same in every process."""
        return SPECS.key(self)

    @property
    def rows(self) -> int:
        """Rows (of `dim`) in each rank's padded shard: `ceil(shape[dim] / group_size)`, as
        `torch.chunk` cuts, and one of what has none.
        """
        return max(1, -(-self.shape[self.dim] // self.group_size))

    @property
    def shard_numel(self) -> int:
        """Elements in each rank's padded shard."""
        return _shard_numel(self.shape, self.dim, self.group_size)

    def full_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of the full parameter with its padding, as it is gathered, or in another dtype."""
        return self.group_size * self.shard_numel * (dtype or self.dtype).itemsize

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of each rank's padded shard."""
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the parameter with the rows that only fill up the last shards."""
        return (*self.shape[: self.dim], self.rows * self.group_size, *self.shape[self.dim + 1 :])

    @property
    def reduction(self) -> Reduction:
        """The reduction fields as one record."""
        return Reduction(
            self.reduce_dtype,
            self.reduce_op,
            self.reduce_algorithm,
            self.pre_divide,
            self.post_divide,
            self.replicate_size,
            self.replicate_group,
            self.sync,
            self.is_accumulating,
            self.hook,
            self.retained_dtype,
        )

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which unreduced gradients are added up."""
        return self.retained_dtype or self.reduce_dtype

    @property
    def is_widened(self) -> bool:
        """Whether that has more bytes than what it is computed with."""
        return self.dtype.is_floating_point and self.sum_dtype.itemsize > self.dtype.itemsize

    def kept_dtype(self, flat: torch.dtype) -> torch.dtype:
        """The dtype of its flat gradient, where the flat buffer is of `flat`."""
        return self.grad_dtype or flat

    def over_post_group(self) -> ParamSpec:
        """The same parameter cut for the smaller post-forward mesh (`reshard == "slice"`); a slice
        holds what the codes stand for, and travels as it is.
        """
        return replace(
            self,
            offset=0,
            group_size=self.post_size,
            group=self.post_group,
            gather_algorithm="",
            gather_quantized=None,
            device="",  # what is kept of a full parameter is where that was
        )


_known: dict[str, ParamSpec] = {}  # by their texts


def _write(spec: ParamSpec) -> str:
    text = repr(spec)
    _known.setdefault(text, spec)
    return text


def _read(text: str) -> ParamSpec:
    if text not in _known:  # of another process
        _known[text] = _parse(text)
    return _known[text]


def _parse(text: str) -> ParamSpec:
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != ParamSpec.__name__:
            raise TypeError("no ParamSpec")
        return ParamSpec(**{str(word.arg): _value(word.value) for word in call.keywords})
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"ParamSpec.of: got {text!r}; should be a ParamSpec as text (ParamSpec.args()): {error}"
        ) from error


def _value(node: ast.expr) -> Any:
    """A field's value: a literal, a dtype of torch, or infinity."""
    if isinstance(node, ast.Attribute):
        dtype = getattr(torch, node.attr, None) if ast.unparse(node.value) == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{ast.unparse(node)} is no dtype")
        return dtype
    if ast.unparse(node) in ("inf", "-inf"):
        return math.copysign(math.inf, -1.0 if isinstance(node, ast.UnaryOp) else 1.0)
    return ast.literal_eval(node)


def _digest(spec: ParamSpec, _: int) -> str:
    return f"spec_{hashlib.sha256(repr(spec).encode()).hexdigest()[:32]}"


SPECS: Keys[ParamSpec] = Keys(_digest)
