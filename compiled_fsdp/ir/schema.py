"""The IR: the `fsdp::` ops that a sharded model traces to, and what they do when nothing lowers
them.

| op | means |
| --- | --- |
| `unshard(flat, *spec) -> param` | the full parameter `spec.shape` of `spec.dtype`, from this unit's flat local buffer |
| `reduce_grad(grad, flat, *spec) -> flat_grad` | the gradient of `flat` that one parameter's gradient contributes |
| `keep_slice(param, *spec) -> slice` | this rank's 1/post_size of a parameter, kept from forward to backward (int reshard) |
| `unshard_slice(slice, *spec) -> param` | the parameter again, gathered over the small group |
| `mark_grads_(flat_grad, flat, offsets)` | tells the unit which of its parameters have a gradient in this backward |
| `retain_(grads, flat, offsets, where)` | the unit keeps (adds up) gradients that are not fully reduced in this backward |
| `add_retained_(grads, flat, offsets, where)` | adds what was kept, and forgets it |
| `all_reduce_hook(grads, key)` | the user's hook on the flat reduced gradient |
| `custom_all_gather(shard, ...)`, `custom_reduce_scatter(rows, ...)` | started, not awaited: the user's own communication |
| `reduce_later_(started, flat, offsets, *spec)` | the unit finishes a reduction under way, once its gradient is read |
| `step_(flat_grad, flat, offsets)` | the optimizer steps these parameters now, if it overlaps; else they get their gradient |
| `gather_ahead(shard, flat, start, ...) -> gathered` | an all-gather of `flat[start:]`, unless under way since the last step |
| `flatten_grad(grad, start, numel, order) -> flat_grad` | a gradient at its place in a flat parameter's, in zeros |
| `copy_columns(columns) -> param` | a contiguous copy: `clone` in a gather, where Inductor would compile a kernel |
| `all_gather(shard, sizes, group_size, group, what, phase) -> gathered` | started, not awaited: pieces gathered side by side |
| `all_to_all(rows, group_size, group, what, phase) -> received` | started, not awaited: row r of each piece goes to rank r |
| `all_reduce(rows, op, group, what, phase) -> reduced` | torch's, started, not awaited, with a name in profiles |
| `agree(token, text, groups, record)` | compares a graph's collectives between the ranks, the first time, and says what runs |
| `watch_heads(token, flats, num_outputs, text)` | parameters that only some outputs lead to, for the backward that uses others |
| `free(buffer)` | the lifetime of a gathered or bucket buffer ends here |

`spec` stands for the fields of `compiled_fsdp.ir.spec.ParamSpec`, in order. All but the last three
are functional, have fake kernels, and never alias their inputs. `unshard` is differentiable once;
its formula is `reduce_grad`, which takes the flat buffer for its size, its dtype, and so that
`mark_grads_` can reach the unit at run time without any registry.

Run as they are (`backend="aot_eager"`, say) the ops are correct and slow: one collective per
parameter, none overlapped.
"""

from __future__ import annotations

import torch

SPEC = (
    "SymInt offset, SymInt[] shape, SymInt dim, ScalarType dtype, SymInt group_size, str group, "
    "str gather_algorithm, str reduce_group, str reshard, SymInt post_size, str post_group, "
    "ScalarType reduce_dtype, str reduce_op, str reduce_algorithm, float pre_divide, float "
    "post_divide, SymInt replicate_size, str replicate_group, str sync, bool is_accumulating, str "
    "hook, str overlap, str unit, str fqn, SymInt reduces_in_flight, str[] forward_after, str[] "
    "backward_after, SymInt own_message, float forward_ahead, float backward_ahead, ScalarType? "
    "retained_dtype"
)

# Each run of these does something on the host: no CUDA graph may replay them.
HOST = (torch.Tag.cudagraph_unsafe,)

library = torch.library.Library("fsdp", "DEF")
library.define(f"unshard(Tensor flat, {SPEC}) -> Tensor")
library.define(
    f"reduce_grad(Tensor grad, Tensor flat, {SPEC}) -> Tensor", tags=HOST
)  # run unlowered, it marks
library.define(f"keep_slice(Tensor param, {SPEC}) -> Tensor")
library.define(f"unshard_slice(Tensor slice, {SPEC}) -> Tensor")
library.define("mark_grads_(Tensor(a!) flat_grad, Tensor flat, SymInt[] offsets) -> ()", tags=HOST)
library.define(
    "retain_(Tensor(a!) grads, Tensor flat, SymInt[] offsets, str where) -> ()", tags=HOST
)
library.define(
    "add_retained_(Tensor(a!) grads, Tensor flat, SymInt[] offsets, str where) -> ()", tags=HOST
)
library.define("all_reduce_hook(Tensor grads, str key) -> Tensor", tags=HOST)
library.define(
    "custom_all_gather(Tensor shard, SymInt group_size, str group, str algorithm) -> Tensor",
    tags=HOST,
)
library.define(
    "custom_reduce_scatter(Tensor rows, str op, SymInt group_size, str group, str algorithm) -> "
    "Tensor",
    tags=HOST,
)
library.define(
    f"reduce_later_(Tensor(a!) started, Tensor flat, SymInt[] offsets, {SPEC}) -> ()", tags=HOST
)
library.define("step_(Tensor(a!) flat_grad, Tensor(b!) flat, SymInt[] offsets) -> ()", tags=HOST)
library.define(
    "gather_ahead(Tensor shard, Tensor flat, SymInt start, SymInt[] sizes, SymInt group_size, str "
    "group) -> Tensor",
    tags=HOST,
)
library.define("flatten_grad(Tensor grad, SymInt start, SymInt numel, SymInt[] order) -> Tensor")
library.define("copy_columns(Tensor columns) -> Tensor")
library.define(
    "all_gather(Tensor shard, SymInt[] sizes, SymInt group_size, str group, str what='', str "
    "phase='') -> Tensor"
)
library.define(
    "all_to_all(Tensor[] rows, SymInt group_size, str group, str what='', str phase='') -> Tensor"
)
library.define("all_reduce(Tensor rows, str op, str group, str what='', str phase='') -> Tensor")
library.define("agree(Tensor(a!) token, str text, str[] groups, str record='') -> ()", tags=HOST)
library.define(
    "watch_heads(Tensor(a!) token, Tensor[] flats, SymInt num_outputs, str text) -> ()", tags=HOST
)
library.define("free(Tensor buffer) -> ()")

fsdp = torch.ops.fsdp
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
GATHER_AHEAD = fsdp.gather_ahead.default
FLATTEN_GRAD = fsdp.flatten_grad.default
COPY_COLUMNS = fsdp.copy_columns.default
ALL_GATHER = fsdp.all_gather.default
ALL_TO_ALL = fsdp.all_to_all.default
ALL_REDUCE = fsdp.all_reduce.default
AGREE = fsdp.agree.default
WATCH_HEADS = fsdp.watch_heads.default
FREE = fsdp.free.default

for _effect in (RETAIN, ADD_RETAINED, REDUCE_LATER, STEP, FREE, AGREE, WATCH_HEADS):
    torch.fx.node.has_side_effect(_effect)
torch.fx.node.has_side_effect(MARK_GRADS)
