"""The IR: the `fsdp::` ops that a sharded model traces to, and what they do when nothing lowers
them.

`unshard(flat, spec) -> param`
    the full parameter `spec.shape` of `spec.dtype`, from this unit's flat local buffer
`reduce_grad(grad, flat, spec) -> flat_grad`
    the gradient of `flat` that one parameter's gradient contributes
`keep_slice(param, spec) -> slice`
    this rank's 1/post_size of a parameter, kept from forward to backward (int reshard)
`unshard_slice(slice, spec) -> param`
    the parameter again, gathered over the small group
`mark_grads_(flat_grad, flat, offsets)`
    tells the unit which of its parameters have a gradient in this backward
`retain_(grads, flat, offsets, where)`
    the unit keeps (adds up) gradients that are not fully reduced in this backward
`add_retained_(grads, flat, offsets, where)`
    adds what was kept, and forgets it
`all_reduce_hook(grads, key)`
    the user's hook on the flat reduced gradient
`custom_all_gather(shard, ...)`, `custom_reduce_scatter(rows, ...)`
    started, not awaited: the user's own communication
`reduce_later_(started, flat, offsets, codes, spec)`
    the unit finishes a reduction under way, once its gradient is read
`step_(flat_grad, flat, offsets)`
    the optimizer steps these parameters now, if it overlaps; else they get their gradient
`update_(flat_grad, flat, offsets, step, found_inf, state_numel, is_hosted, state)`
    a step's optimizer updates these (none: `flat`) unless `found_inf`; what it remembers of them
    are so many elements, which rest on the host if `is_hosted`: then `state` is a copy of them
`fetch_state(flat, offsets, step, numel) -> state`
    what a step's optimizer remembers of these comes from the host: started, not awaited
`store_state(state, flat, offsets, step) -> token`
    it goes back there: started, not awaited
`momentum_(flat_grad, flat, offsets, step, ...) -> pieces`
    matrices: adds to their momentum; pieces of what is orthogonalized
`to_owners(pieces, numels, owners, ...) -> received`
    started, not awaited: each matrix's pieces go to its owner: [N, n] there
`orthogonalize(received, flat, offsets, owners, ...) -> updates`
    at owners: whole matrices, orthogonalized, as pieces [N, n]
`from_owners(updates, numels, owners, ...) -> pieces`
    started, not awaited: each rank's pieces come back from the owners
`update_matrices_(pieces, flat, offsets, step)`
    the optimizer of a whole step updates this rank's pieces of these matrices
`shard_norms(flat_grad, flat, offsets) -> norms`
    2-norms of this rank's parts of these gradients, without what fills them up
`gather_ahead(shard, flat, start, ...) -> gathered`
    an all-gather of `flat[start:]`, unless under way since the last step
`gather_next(flat, start, ...)`
    the same all-gather for the next step, once the buffer is updated; the unit keeps it under way
`flatten_grad(grad, start, numel, order) -> flat_grad`
    a gradient at its place in a flat parameter's, in zeros
`cast_grad(grad, dtype) -> grad`
    a gradient before and behind a sum that is made in a wider dtype, on its way to `reduce_grad`
`copy_columns(columns) -> param`
    a contiguous copy: `clone` in a gather, where Inductor would compile a kernel
`all_gather(shard, sizes, group_size, group, what, phase) -> gathered`
    started, not awaited: pieces gathered side by side; one, where no sizes are given
`all_to_all(rows, group_size, group, what, phase) -> received`
    started, not awaited: row r of each piece goes to rank r
`all_reduce(rows, op, group, what, phase) -> reduced`
    torch's, started, not awaited, with a name in profiles
`agree(token, text, groups, record)`
    compares a graph's collectives between the ranks, the first time, and says what runs
`watch_heads(token, flats, num_outputs, text)`
    parameters that only some outputs lead to, for the backward that uses others
`copy_to(x, device, pins) -> copied`
    between host memory, where an offloaded unit rests, and the device that computes
`start_copy(x, device, pins) -> copied`
    the same, started, not awaited
`offload(x, pins) -> copied`
    an activation to the host, started; awaited by the device, which alone reads it again
`reload(x, device) -> copied`
    it comes back to the device: started, not awaited
`encode(pieces, codes) -> payload`
    bytes of pieces [rows, n_i]: codes and scales, or as they are (`quantized.py`)
`decode(payload, numel, dtype, codes) -> values`
    what such bytes stand for, [rows, numel]
`decode_sum(payload, numel, dtype, codes) -> sum`
    the sum of that over rows: [numel]
`checksum(pieces, rows, messages, sizes) -> sums`
    integer sums of the bits that each rank has of each parameter
`compare_(sent, received, rests, flats, ...)`
    notes checksums; ranks compare them at the end of backward
`verdict_(grads, sums, flat, step)`
    in a whole step: ranks compare their checksums, before anything is updated
`note_counts_(received, sent)`
    tokens for each expert that ranks tell each other, for a profile, while one is on
`free(buffer)`
    the lifetime of a gathered or bucket buffer ends here

`spec` is a `compiled_fsdp.ir.spec.ParamSpec`, as text. All but `agree`, `watch_heads`, `compare_`,
`verdict_`, `note_counts_` and `free` are functional, have fake kernels, and never alias their
inputs. `unshard` is differentiable once; its formula is `reduce_grad`, which takes the flat buffer
for its size, its dtype, and so that `mark_grads_` can reach the unit at run time
without any registry.

Run as they are (`backend="aot_eager"`, say) the ops are correct and slow: one collective per
parameter, none overlapped.

Whatever else the program has to know of an op stands in its row of `TRAITS`, once: passes, prices,
memory model, printer and `verify` ask `traits_of`. A new op is an entry in the list above, a
schema and a row of traits here, its kernel in `wire/ops.py` or beside it,
and the pass that makes it.

Private torch used here (tried on 2.13): the `_c10d_functional` ops (`group` is the group's name).
They move when `group_name` changes its type, as in 2.13, where a name, a group or an FX node is
accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives  # registers the ops and makes wait_tensor impure

from .spec import ParamSpec

if TYPE_CHECKING:
    from torch.fx import Node

SPEC = "str spec"  # a `ParamSpec`, see `spec.py`

SCHEMAS = (
    f"unshard(Tensor flat, {SPEC}) -> Tensor",
    f"reduce_grad(Tensor grad, Tensor flat, {SPEC}) -> Tensor",
    f"keep_slice(Tensor param, {SPEC}) -> Tensor",
    f"unshard_slice(Tensor slice, {SPEC}) -> Tensor",
    "mark_grads_(Tensor(a!) flat_grad, Tensor flat, SymInt[] offsets) -> ()",
    "retain_(Tensor(a!) grads, Tensor flat, SymInt[] offsets, str where) -> ()",
    "add_retained_(Tensor(a!) grads, Tensor flat, SymInt[] offsets, str where) -> ()",
    "all_reduce_hook(Tensor grads, str key) -> Tensor",
    "custom_all_gather(Tensor shard, SymInt group_size, str group, str algorithm) -> Tensor",
    "custom_reduce_scatter(Tensor rows, str op, SymInt group_size, str group, str algorithm) -> "
    "Tensor",
    f"reduce_later_(Tensor(a!) started, Tensor flat, SymInt[] offsets, str[] codes, {SPEC}) -> ()",
    "step_(Tensor(a!) flat_grad, Tensor(b!) flat, SymInt[] offsets) -> ()",
    "update_(Tensor(a!) flat_grad, Tensor(b!) flat, SymInt[] offsets, str step, "
    "Tensor? found_inf=None, SymInt state_numel=0, bool is_hosted=False, Tensor(c!)? state=None) "
    "-> ()",
    "fetch_state(Tensor flat, SymInt[] offsets, str step, SymInt numel) -> Tensor",
    "store_state(Tensor state, Tensor flat, SymInt[] offsets, str step) -> Tensor",
    "momentum_(Tensor(a!) flat_grad, Tensor flat, SymInt[] offsets, str step, SymInt numel, "
    "ScalarType dtype, Tensor? found_inf=None) -> Tensor",
    "to_owners(Tensor pieces, SymInt[] numels, SymInt[] owners, SymInt group_size, str group, str "
    "what='') -> Tensor",
    "orthogonalize(Tensor received, Tensor flat, SymInt[] offsets, SymInt[] owners, str step, "
    "float flops) -> Tensor",
    "from_owners(Tensor updates, SymInt[] numels, SymInt[] owners, SymInt group_size, str group, "
    "str what='') -> Tensor",
    "update_matrices_(Tensor(a!) pieces, Tensor(b!) flat, SymInt[] offsets, str step) -> ()",
    "shard_norms(Tensor flat_grad, Tensor flat, SymInt[] offsets) -> Tensor",
    "gather_ahead(Tensor shard, Tensor flat, SymInt start, SymInt[] sizes, ScalarType dtype, "
    "SymInt group_size, str group, SymInt[] numels, str[] codes) -> Tensor",
    "gather_next(Tensor(a!) flat, SymInt start, SymInt[] sizes, ScalarType dtype, "
    "SymInt group_size, str group, SymInt[] numels, str[] codes) -> ()",
    "flatten_grad(Tensor grad, SymInt start, SymInt numel, SymInt[] order) -> Tensor",
    "cast_grad(Tensor grad, ScalarType dtype) -> Tensor",
    "copy_columns(Tensor columns) -> Tensor",
    "all_gather(Tensor shard, SymInt[] sizes, SymInt group_size, str group, str what='', str "
    "phase='') -> Tensor",
    "all_to_all(Tensor[] rows, SymInt group_size, str group, str what='', str phase='') -> Tensor",
    "all_reduce(Tensor rows, str op, str group, str what='', str phase='') -> Tensor",
    "agree(Tensor(a!) token, str text, str[] groups, str record='') -> ()",
    "watch_heads(Tensor(a!) token, Tensor[] flats, SymInt num_outputs, str text) -> ()",
    "copy_to(Tensor x, str device, bool pins) -> Tensor",
    "start_copy(Tensor x, str device, bool pins) -> Tensor",
    "offload(Tensor x, bool pins) -> Tensor",
    "reload(Tensor x, str device) -> Tensor",
    "encode(Tensor[] pieces, str[] codes) -> Tensor",
    "decode(Tensor payload, SymInt numel, ScalarType dtype, str codes) -> Tensor",
    "decode_sum(Tensor payload, SymInt numel, ScalarType dtype, str codes) -> Tensor",
    "checksum(Tensor[] pieces, SymInt rows, SymInt[] messages, SymInt[] sizes) -> Tensor",
    "compare_(Tensor(a!) sent, Tensor received, Tensor[] rests, Tensor[] flats, SymInt[] counts, "
    "str collective, str phase, str[] names) -> ()",
    "verdict_(Tensor(a!)[] grads, Tensor[] sums, Tensor flat, str step) -> ()",
    "note_counts_(Tensor(a!) received, Tensor sent) -> ()",
    "free(Tensor buffer) -> ()",
)


@dataclass(frozen=True, slots=True)
class Traits:
    """Everything that the program has to know of an op; the columns of the table below, in order.

    spec_at: how many arguments stand before its `ParamSpec`; 0: it has none.
    lowers_to: the kind of communication ("gather", "reduce") that has to stand in its place.
    starts: the collective that it starts: "gather", "reduce_scatter", "all_to_all", "all_reduce";
        or a "copy" between host and device, which is none, but is awaited as one.
    price: "none"; "kernel", for overhead and memory traffic; "copy", for the same where kernels
        before and after it may still be one; of a collective, the field of `costs.Link` with its
        bandwidth.
    awaits: whether a collective that it is given is over with it: "" (no), "graph" (when it has
        run), or "unit" (at some time after the graph).
    is_buffer: whether what it starts arrives in a buffer of its own, which the graph frees.
    is_alias: whether the result lies in the first argument's storage, although the schema does not
        say so.
    effect: why it counts, other than for its result or as a collective: "" (it does not),
        "program" (it is part of what the user's program means), or "notes" (of our own).
    marks: whether its third argument names parameters whose gradients are complete.
    is_on_host: whether each run does something on the host, so that no CUDA graph may replay it.
    is_replayed: whether that of a whole step may all the same ("each" in the table): the kernel
        hands the host's part to `each_run` (`wire/captured.py`).
    """

    spec_at: int
    lowers_to: str
    starts: str
    price: str
    awaits: str
    is_buffer: bool
    is_alias: bool
    effect: str
    marks: bool
    is_on_host: bool
    is_replayed: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether it starts what other ranks take part in."""
        return self.starts not in ("", "copy")


def _row(text: str) -> Traits:
    spec_at, *words = text.split()
    known = {"-": "", "yes": True, "each": True, "no": False}
    values: list[Any] = [known.get(word, word) for word in words]
    return Traits(int(spec_at), *values, *[words[-1] == "each"])


# fmt: off
OURS = {
    #                          sp lowers starts         price     awaits buf als effect  mks host
    "unshard":                "1  gather -              kernel    -      no  no  -       no  no",
    "reduce_grad":            "2  reduce -              kernel    -      no  no  -       no  yes",
    "keep_slice":             "1  -      -              kernel    -      no  no  -       no  no",
    "unshard_slice":          "1  gather -              kernel    -      no  no  -       no  no",
    "mark_grads_":            "0  -      -              none      -      no  no  program yes each",
    "retain_":                "0  -      -              kernel    -      no  no  program no  yes",
    "add_retained_":          "0  -      -              kernel    -      no  no  program no  yes",
    "all_reduce_hook":        "0  -      -              kernel    -      no  no  -       no  yes",
    "custom_all_gather":      "0  -      gather         bandwidth -      no  no  -       no  yes",
    "custom_reduce_scatter":  "0  -      reduce_scatter bandwidth -      no  no  -       no  yes",
    "reduce_later_":          "4  -      -              kernel    unit   no  no  program yes yes",
    "step_":                  "0  -      -              none      -      no  no  program yes yes",
    "update_":                "0  -      -              kernel    -      no  no  program no  each",
    "fetch_state":            "0  -      copy           none      -      no  no  -       no  yes",
    "store_state":            "0  -      copy           none      -      no  no  -       no  yes",
    "momentum_":              "0  -      -              kernel    -      no  no  program no  yes",
    "to_owners":              "0  -      all_to_all     exchange  -      no  no  -       no  no",
    "orthogonalize":          "0  -      -              kernel    -      no  no  -       no  yes",
    "from_owners":            "0  -      all_to_all     exchange  -      no  no  -       no  no",
    "update_matrices_":       "0  -      -              kernel    -      no  no  program no  yes",
    "shard_norms":            "0  -      -              kernel    -      no  no  -       no  each",
    "gather_ahead":           "0  -      gather         bandwidth -      yes no  -       no  yes",
    "gather_next":            "0  -      -              none      -      no  no  notes   no  yes",
    "flatten_grad":           "0  -      -              kernel    -      no  no  -       no  no",
    "cast_grad":             "0  -      -              kernel    -      no  no  -       no  no",
    "copy_columns":           "0  -      -              copy      -      no  no  -       no  no",
    "all_gather":             "0  -      gather         bandwidth -      yes no  -       no  no",
    "all_to_all":             "0  -      all_to_all     exchange  -      yes no  -       no  no",
    "all_reduce":             "0  -      all_reduce     bandwidth -      no  no  -       no  no",
    "agree":                  "0  -      -              none      -      no  no  notes   no  each",
    "watch_heads":            "0  -      -              none      -      no  no  notes   no  yes",
    "copy_to":                "0  -      -              kernel    -      no  no  -       no  yes",
    "start_copy":             "0  -      copy           none      -      no  no  -       no  yes",
    "offload":                "0  -      copy           none      -      no  no  -       no  yes",
    "reload":                 "0  -      copy           none      -      no  no  -       no  yes",
    "encode":                 "0  -      -              kernel    -      no  no  -       no  no",
    "decode":                 "0  -      -              kernel    -      no  no  -       no  no",
    "decode_sum":             "0  -      -              kernel    -      no  no  -       no  no",
    "checksum":               "0  -      -              kernel    -      no  no  -       no  no",
    "compare_":               "0  -      -              none      -      no  no  notes   no  yes",
    "verdict_":               "0  -      -              none      -      no  no  notes   no  yes",
    "note_counts_":           "0  -      -              none      -      no  no  notes   no  yes",
    "free":                   "0  -      -              none      -      no  no  notes   no  no",
}
TORCHS = {
    "all_gather_into_tensor": "0  -      gather         bandwidth -      yes no  -       no  no",
    "reduce_scatter_tensor":  "0  -      reduce_scatter scatter   -      no  no  -       no  no",
    "all_reduce":             "0  -      all_reduce     bandwidth -      no  no  -       no  no",
    "all_to_all_single":      "0  -      all_to_all     exchange  -      no  no  -       no  no",
    "wait_tensor":            "0  -      -              none      graph  no  yes -       no  no",
}
# fmt: on
_OTHER = _row("0 - - kernel - no no - no no")

library = torch.library.Library("fsdp", "DEF")
for _schema in SCHEMAS:
    _is_on_host = _row(OURS[_schema.partition("(")[0]]).is_on_host
    library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,) if _is_on_host else ())

fsdp, c10d = torch.ops.fsdp, torch.ops._c10d_functional
TRAITS: dict[torch._ops.OpOverload, Traits] = {
    getattr(ops, name).default: _row(row)
    for ops, rows in ((fsdp, OURS), (c10d, TORCHS))
    for name, row in rows.items()
}


def traits_of(op: object) -> Traits:
    """The row of an op; for what is neither ours nor a collective, that of any kernel."""
    return TRAITS.get(op, _OTHER)  # type: ignore[call-overload, no-any-return]


# What is captured of communications, and has to be lowered to collectives.
TO_LOWER = tuple(op for op, traits in TRAITS.items() if traits.lowers_to)


def param_spec(node: Node) -> ParamSpec:
    """The parameter that a node of ours is about.

    Raises:
        ValueError: its op has no `ParamSpec` among its arguments.
    """
    at = traits_of(node.target).spec_at
    if not at:
        raise ValueError(f"%{node.name} ({node.target}) has no ParamSpec among its arguments")
    return ParamSpec.of(node.args[at:])


def set_param_spec(node: Node, spec: ParamSpec) -> None:
    """Let a node be about a parameter with other settings."""
    at = traits_of(node.target).spec_at
    node.args = (*node.args[:at], *spec.args())


BACKWARD = "backward"  # the `step` of an `update_` that leaves gradients, instead of an optimizer

UNSHARD = fsdp.unshard.default
REDUCE_GRAD = fsdp.reduce_grad.default
KEEP_SLICE = fsdp.keep_slice.default
UNSHARD_SLICE = fsdp.unshard_slice.default
MARK_GRADS = fsdp.mark_grads_.default
RETAIN = fsdp.retain_.default
ADD_RETAINED = fsdp.add_retained_.default
HOOK = fsdp.all_reduce_hook.default
CUSTOM_ALL_GATHER = fsdp.custom_all_gather.default
CUSTOM_REDUCE_SCATTER = fsdp.custom_reduce_scatter.default
REDUCE_LATER = fsdp.reduce_later_.default
STEP = fsdp.step_.default
UPDATE = fsdp.update_.default
FETCH_STATE = fsdp.fetch_state.default
STORE_STATE = fsdp.store_state.default
MOMENTUM = fsdp.momentum_.default
TO_OWNERS = fsdp.to_owners.default
ORTHOGONALIZE = fsdp.orthogonalize.default
FROM_OWNERS = fsdp.from_owners.default
UPDATE_MATRICES = fsdp.update_matrices_.default
SHARD_NORMS = fsdp.shard_norms.default
GATHER_AHEAD = fsdp.gather_ahead.default
GATHER_NEXT = fsdp.gather_next.default
FLATTEN_GRAD = fsdp.flatten_grad.default
CAST_GRAD = fsdp.cast_grad.default
COPY_COLUMNS = fsdp.copy_columns.default
ALL_GATHER = fsdp.all_gather.default
ALL_TO_ALL = fsdp.all_to_all.default
ALL_REDUCE = fsdp.all_reduce.default
AGREE = fsdp.agree.default
WATCH_HEADS = fsdp.watch_heads.default
COPY_TO = fsdp.copy_to.default
START_COPY = fsdp.start_copy.default
OFFLOAD = fsdp.offload.default
RELOAD = fsdp.reload.default
ENCODE = fsdp.encode.default
DECODE = fsdp.decode.default
DECODE_SUM = fsdp.decode_sum.default
CHECKSUM = fsdp.checksum.default
COMPARE = fsdp.compare_.default
VERDICT = fsdp.verdict_.default
NOTE_COUNTS = fsdp.note_counts_.default
FREE = fsdp.free.default
# What makes a parameter of what was gathered, and may be called with what computes of it.
COPIES_OUT = frozenset((COPY_COLUMNS, DECODE))
EXCHANGE = c10d.all_to_all_single.default  # the user's

for _op, _traits in TRAITS.items():
    if _traits.effect:
        torch.fx.node.has_side_effect(_op)
