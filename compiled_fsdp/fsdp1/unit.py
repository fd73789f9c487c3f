"""The unit of one FSDP1 instance: its flat parameter, and its settings as those of any unit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy, ShardingStrategy

from compiled_fsdp.ir.collectives import CUSTOM
from compiled_fsdp.ir.spec import REGISTRY
from compiled_fsdp.units.cutting import sharded_as
from compiled_fsdp.units.layout import flat_layout
from compiled_fsdp.units.offload import Offload
from compiled_fsdp.units.unit import Unit

from .comm_hook import AllReduceHook, ReduceScatterHook
from .flat_shard import FlatShard, FlatShardBuffer, members_of
from .gradients import low_precision, reads_at_once
from .groups import groups_of
from .stock import default_hooks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam

RESHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
LOW_PRECISION = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
PREFETCH = {BackwardPrefetch.BACKWARD_PRE: "pre", BackwardPrefetch.BACKWARD_POST: "post", None: ""}


class FlatUnit(Unit):
    """An instance's flat parameter, or none; strategy, precision and prefetching as settings of a
    unit.
    """

    is_flat = True
    keeper: Any = None

    def __init__(self, wrapper: Any, originals: Iterable[nn.Parameter]) -> None:
        is_resharded = wrapper.sharding_strategy in RESHARDED
        super().__init__(
            (wrapper,),
            (),
            groups_of(wrapper),
            MixedPrecisionPolicy(),
            None if is_resharded else False,
            # On the CPU stock's own error comes, at the first forward: there is no pinned memory.
            Offload.beside(wrapper.compute_device, pins=True)
            if wrapper.cpu_offload.offload_params
            else None,
        )
        self.wrapper = wrapper
        self.kind = type(wrapper.module).__name__
        self.keeper = wrapper._handle
        self.published_mode: object = None
        self.settings.forward_prefetch = wrapper.forward_prefetch
        self.settings.backward_prefetch = PREFETCH[wrapper.backward_prefetch]
        # What may be under way: with a limit two gathers, and in backward one, or none without
        # `backward_prefetch`.
        self.settings.forward_ahead = 2.0 if wrapper.limit_all_gathers else -1.0
        self.settings.backward_ahead = 1.0 if self.settings.backward_prefetch == "pre" else 0.0
        if self.keeper is not None:
            self.flats = [self._buffer(is_resharded)]
            if not self.keeper._use_orig_params:
                for original in originals:
                    sharded_as[original] = self, self.shard
        self.adopt({wrapper: ""}, is_nested=False)

    @property
    def shard(self) -> FlatShard:
        """The flat parameter, where there is one."""
        return self.flats[0].params[0]  # type: ignore[return-value]

    @property
    def buffer(self) -> FlatShardBuffer:
        """Its flat buffer."""
        return self.flats[0]  # type: ignore[return-value]

    def _buffer(self, is_resharded: bool) -> FlatShardBuffer:
        flat: Any = self.keeper.flat_param
        info = self.mesh_info
        layout = flat_layout([flat._unpadded_unsharded_size], info.shard_size)
        members = members_of(flat)
        owners = list({(m.module, m.name): None for m in members})
        shard = FlatShard(
            owners,
            self.wrapper,
            "_flat_param",
            flat,
            layout.shards[0],
            keeper=self.keeper,
            members=members,
        )
        shard.hides_after_forward = is_resharded
        data = nn.Parameter(flat.data, requires_grad=flat.requires_grad)
        return FlatShardBuffer(self, info, layout, [shard], data)

    def make_spec(self, flat: FlatBuffer, param: ShardedParam) -> ParamSpec:
        """As any unit's, with FSDP1's dtypes and divisions: before and after the sum, near the
        square root of the ranks.

        What `no_sync` accumulates stays in the dtype of the computation.
        """
        state, keeper = self.wrapper, self.keeper
        is_full = keeper._force_full_precision
        compute = keeper._orig_param_dtype if is_full else keeper._fwd_bwd_param_dtype
        hook = state._comm_hook
        reduce_dtype = compute if is_full else keeper._reduce_dtype
        self.mp_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype)
        spec = super().make_spec(flat, param)
        spec = replace(
            spec,
            reduce_op="sum",
            retained_dtype=compute,
            pre_divide=float(state._gradient_predivide_factor),
            post_divide=float(state._gradient_postdivide_factor),
        )
        return spec if hook is None else self._hooked(spec)

    @property
    def is_reduced_by_user(self) -> bool:
        """See `Unit`."""
        hook = self.wrapper._comm_hook
        return hook is not None and hook not in LOW_PRECISION

    @property
    def mode(self) -> object:
        """See `Unit`; the dtypes of evaluation, the user's hook, and which originals are frozen."""
        if self.keeper is None:
            return None
        hook = self.wrapper._comm_hook
        originals = self.keeper.flat_param._params or ()
        is_full, frozen = (
            self.keeper._force_full_precision,
            tuple(not p.requires_grad for p in originals),
        )
        return (
            is_full,
            hook and id(hook),
            id(self.wrapper._comm_hook_state),
            frozen,
            self.keeper._fwd_bwd_param_dtype,
        )

    def why_not_in_step(self, *, changes_grads: bool) -> str:
        """See `Unit`."""
        if self.keeper is None:
            return ""
        if changes_grads and low_precision(self.keeper) is not None:
            return (
                "keep_low_precision_grads=True has gradients cast behind the reduction, before the "
                "loop clips or unscales them. Leave it out"
            )
        if reads_at_once(self.keeper):
            return (
                "optimizers step inside of backward (_apply_optimizer_in_backward). Leave them out"
            )
        return ""

    def _hooked(self, spec: ParamSpec) -> ParamSpec:
        """The user's hook reduces, and divides as it likes; torch's low-precision ones are a
        dtype.
        """
        hook, state = self.wrapper._comm_hook, self.wrapper._comm_hook_state
        if hook in LOW_PRECISION:
            pre, post = state.gradient_predivide_factor, state.gradient_postdivide_factor
            return replace(
                spec,
                reduce_dtype=LOW_PRECISION[hook],
                pre_divide=float(pre),
                post_divide=float(post),
            )
        plain = replace(spec, pre_divide=1.0, post_divide=1.0)
        if spec.group_size > 1:
            key = REGISTRY.key(ReduceScatterHook.of(hook, state), self.brought)
            return replace(plain, reduce_algorithm=CUSTOM + key)
        return replace(
            plain,
            replicate_size=1,
            replicate_group="",
            hook=REGISTRY.key(AllReduceHook.of(hook, state), self.brought),
        )

    def sync_gradients(self, value: bool) -> None:
        """Whether backward reduces. Strategies that keep parameters after forward keep them after a
        backward that does not.
        """
        settings = self.settings
        settings.requires_gradient_sync = settings.requires_all_reduce = value
        settings.is_accumulating |= not value
        settings.reshard_after_backward = value or self.wrapper.sharding_strategy in RESHARDED
        self.publish()

    def take_over(self) -> None:
        """Follow what the user did to the flat parameter: moved, cast, frozen."""
        for flat in self.flats:
            flat.refresh()
        self.publish()

    def hide(self) -> None:
        """Let the modules hold sharded parameters, even if the full one is kept."""
        if self.keeper is not None:
            self.shard.hide()

    def before_forward(self) -> bool:
        """Do what stock does before a root's forward: settle gradients that the user dropped or
        replaced, and parameters likewise.

        Whether what is gathered now has another dtype than the mode (training or evaluation) asks
        for.
        """
        if self.keeper is None:
            return False
        self.shard.hide()
        self.buffer.hide_unreduced()
        if self.keeper._use_orig_params:
            self.keeper._reset_flat_param_grad_info_if_needed()
            if not self.keeper._skip_writeback_check:
                self.keeper._writeback_orig_params()
        self.flats[0].refresh()
        before = self.shard.spec.dtype
        self.follow_requires_grad()
        return self.shard.spec.dtype != before

    def after_forward(self) -> None:
        """Behind a root's forward: gradients that are not reduced yet are there to be dropped. Not
        where it was traced: Dynamo looks at the gradients of what it traces, and at their shapes.
        """
        if self.keeper is not None:
            self.buffer.show_unreduced()

    def follow_requires_grad(self) -> None:
        """Take over what the user froze or unfroze since the last call, and which precision the
        mode asks for.
        """
        if self.keeper is None:
            return
        (flat,) = self.flats
        wanted = self.keeper.flat_param.requires_grad
        if wanted != flat.data.requires_grad:
            flat.set_requires_grad(wanted)
        if self.published_mode != (wanted, self.mode):
            self.published_mode = wanted, self.mode
            self.publish()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced yet."""
        super().drop_gradients()
        if self.keeper is not None:
            self.buffer.hide_unreduced()
