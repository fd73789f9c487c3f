"""Features that are refused together: which, and words of the sentence that says so."""

from __future__ import annotations

_BUDGET = "so that no budget can choose among them. Leave out one of the two"
_CODED = "uses CPU offload beside an accelerator, which is not supported with it yet. Leave out one"
_EXTENSION = "uses all-gather extensions of tensor subclasses (fsdp_pre_all_gather), which is not"
_FLAT = "flat parameters of FullyShardedDataParallel are not supported yet. Use fully_shard"
_OVERLAPS = "overlaps (overlap_optimizer), so that it steps units while gradients of others are"

_ROWS = {
    "checksums extension": _EXTENSION,
    "extension gather_int8": _EXTENSION,
    "extension reduce_int8": _EXTENSION,
    "both_fp8 extension": _EXTENSION,
    "compile_step extension": "all-gather extensions of tensor subclasses (fsdp_pre_all_gather)",
    "extension reshard_int": "has an all-gather extension. Pass True or False",
    "cpu_offload extension": "no graph can have (blocks.0.up.weight: CPU offload beside an accel",
    "cpu_offload gather_int8": _CODED,
    "cpu_offload reduce_int8": _CODED,
    "both_fp8 cpu_offload": _CODED,
    "checksums cpu_offload": _CODED,
    "checksums reduce_scatter": "so gradients are exchanged and added where they arrive",
    "reduce_int8 reduce_scatter": "so they are exchanged and added where they arrive",
    "both_fp8 reduce_scatter": "so they are exchanged and added where they arrive",
    "checksums overlap": _OVERLAPS,
    "checksums in_backward": _OVERLAPS,
    "in_backward muon": "not supported inside backward. Leave out in_backward=True",
    "muon tp": "a matrix should be cut by Shard over one axis of the mesh",
    **{
        f"{front} {loop}": _FLAT
        for front in ("fsdp1", "fsdp1_flat")
        for loop in ("overlap", "in_backward")
    },
    **{
        f"{regions} {budget}": _BUDGET
        for regions in ("regions_units", "regions_named")
        for budget in ("recompute", "offload", "all_budgets")
    },
}
REFUSED = {frozenset(names.split()): words for names, words in _ROWS.items()}
