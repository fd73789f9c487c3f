"""The features that are tried in pairs: what each changes in how a model is built, sharded, planned
and trained.

Features of one slot exclude each other. What a feature needs comes along with it, so that a pair
with `states` is one with `states` and `compile_step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.planning.costs import Costs, Link

if TYPE_CHECKING:
    from collections.abc import Iterable

EAGER_GRAPH = "compiled_fsdp_eager"
COSTS = Costs(1e9, 1e9, 1e-6, (("", Link(1e-6, 1e9)),), host=1e10)
LEAST: dict[str, Any] = {"memory_budget": 0.0, "costs": COSTS}
FOLLOWED = ("gather_quantized", "reduce_quantized", "exact", "check")  # outside of graphs too


@dataclass(frozen=True)
class Setting:
    """A program: a model, how it is sharded, and how it is trained.

    front: "fully_shard", or "fsdp1" or "fsdp1_flat" (without `use_orig_params`).
    backend: "" runs eagerly.
    compiles: what is compiled: the "model", its "blocks", or a "function" around it.
    grads: the `grad_dtype` of all parameters.
    mesh: "1d", "hsdp", or "tp" (under FSDP over the other axis).
    is_apart: the CPU plays a device beside the host (`kit.offload`).
    varies: the number of rows, from step to step.
    loop: "loop", "compile_step", "overlap", "in_backward", "compiled_optimizer".
    micro: how two micro-batches of a step are reduced: "" has one.
    """

    world: int = 2
    front: str = "fully_shard"
    backend: str = EAGER_GRAPH
    compiles: str = "model"
    dynamic: bool = False
    varies: bool = False
    mesh: str = "1d"
    reshard: bool | int | None = None
    precision: str = ""
    grads: torch.dtype | None = None
    offloads: bool = False
    dim: int = 0
    ignores: bool = False
    units: str = "blocks"
    weights: str = ""
    calls: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    is_apart: bool = False
    loop: str = "loop"
    optimizer: str = "sgd"
    micro: str = ""
    clip: float | None = None
    scaler: str = ""
    has_schedule: bool = False
    is_meta: bool = False
    between: str = ""
    setter: str = ""
    is_dumped: bool = False

    @property
    def is_fsdp1(self) -> bool:
        """Whether the model is a `FullyShardedDataParallel`."""
        return self.front != "fully_shard"

    def eagerly(self) -> Setting:
        """The same without a graph: the ordinary loop."""
        plan = {name: value for name, value in self.plan.items() if name in FOLLOWED}
        return replace(self, backend="", loop="loop", dynamic=False, is_dumped=False, plan=plan)


@dataclass(frozen=True)
class Feature:
    """sets: fields of `Setting`; of `plan`, its fields.
    needs: features that come along.
    without: slots and features with which it means nothing, or which torch has not.
    """

    slot: str
    sets: dict[str, Any]
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def _plan(slot: str, *, needs: tuple[str, ...] = (), **fields: Any) -> Feature:
    return Feature(slot, {"plan": fields}, needs=needs, without=("eager",))


FLAT = ("fsdp1", "fsdp1_flat")
FEATURES: dict[str, Feature] = {
    # how the model is built
    "tied": Feature("weights", {"weights": "tied"}, without=FLAT),
    "frozen": Feature("weights", {"weights": "frozen"}),
    "unused": Feature("weights", {"weights": "unused"}),
    # Of the subclass in `kit.extensions`, which is cut by rows and has no ops on lists.
    "extension": Feature(
        "weights", {"weights": "extension"}, without=(*FLAT, "tp", "other_dim", "foreach")
    ),
    "checkpointed": Feature("calls", {"calls": "checkpointed"}),
    "twice": Feature("calls", {"calls": "twice"}),
    "meta": Feature("made", {"is_meta": True}, without=(*FLAT, "extension")),
    # how it is sharded
    "fsdp1": Feature("front", {"front": "fsdp1"}),
    "fsdp1_flat": Feature("front", {"front": "fsdp1_flat"}),
    "hsdp": Feature("mesh", {"mesh": "hsdp", "world": 4}),
    "tp": Feature("mesh", {"mesh": "tp", "world": 4}, without=FLAT),
    "reshard_keep": Feature("reshard", {"reshard": False}),
    "reshard_int": Feature("reshard", {"reshard": 2, "world": 4}, without=(*FLAT, "mesh")),
    "bf16": Feature("precision", {"precision": "bf16"}),
    "bf16_reduced": Feature("precision", {"precision": "bf16_reduced"}),
    # Torch's AdamW, lists of tensors and a compiled step take gradients of the parameter's dtype.
    "wide_grads": Feature(
        "grads",
        {"grads": torch.float64},
        without=(*FLAT, "adamw", "two_optimizers", "foreach", "compiled_optimizer"),
    ),
    "cpu_offload": Feature("offload", {"offloads": True, "is_apart": True}),
    "other_dim": Feature("placement", {"dim": 1}, without=FLAT),
    # Its gradient is this rank's alone, so that norms would differ. And torch computes with no
    # plain tensor beside DTensors in a list, nor with two dtypes in a layer.
    "ignored": Feature("ignored", {"ignores": True}, without=("clip", "scaler", "foreach", "bf16")),
    "list_units": Feature("units", {"units": "list"}, without=FLAT),
    "one_unit": Feature("units", {"units": "one"}),
    "prefetch_lists": Feature("setter", {"setter": "prefetch_lists"}, without=(*FLAT, "units")),
    "divide_factor": Feature("setter", {"setter": "divide_factor"}, without=FLAT),
    "unshard": Feature("setter", {"setter": "unshard"}, without=FLAT),
    # With `clip`, in eager mode, parameters() has full ones, whose gradients are None: announced.
    "stay_gathered": Feature(
        "setter",
        {"setter": "stay_gathered"},
        needs=("reshard_keep",),
        without=(*FLAT, "clip"),
    ),
    # the plan
    "budget": _plan("budget", **LEAST),
    "recompute": _plan("budget", **LEAST, recompute="budget"),
    "offload": Feature(
        "budget",
        {"plan": {**LEAST, "offload": "budget"}, "is_apart": True},
        without=("eager",),
    ),
    "states": Feature(
        "budget",
        {"plan": {**LEAST, "optimizer_state": "budget"}, "is_apart": True},
        needs=("compile_step",),
    ),
    "all_budgets": Feature(
        "budget",
        {
            "plan": {
                **LEAST,
                "optimizer_state": "budget",
                "offload": "budget",
                "recompute": "budget",
            },
            "is_apart": True,
        },
        needs=("compile_step",),
    ),
    "regions_units": _plan("regions", regions="units"),
    "regions_named": _plan("regions", regions=("Block",)),
    "regions_off": _plan("regions", regions="off"),
    "gather_int8": Feature("codes", {"plan": {"gather_quantized": torch.int8}}),
    "reduce_int8": Feature("codes", {"plan": {"reduce_quantized": torch.int8}}),
    "both_fp8": Feature(
        "codes",
        {
            "plan": {
                "gather_quantized": torch.float8_e4m3fn,
                "reduce_quantized": torch.float8_e4m3fn,
                "exact": ("head.*",),
            }
        },
    ),
    "checksums": Feature("check", {"plan": {"check": "checksums"}}),
    "from_costs": _plan(
        "schedule",
        prefetch="auto",
        backward_prefetch="auto",
        reduces_in_flight="auto",
        bucket_bytes="auto",
        split_bytes="auto",
        own_message="auto",
        reductions="auto",
        copy_out="auto",
        reduction_bytes=2048,
        costs=COSTS,
    ),
    "parts": _plan("schedule", split_bytes=1500),
    "one_bucket": _plan("schedule", bucket_bytes=1 << 20),
    "at_once": _plan("schedule", prefetch=0, backward_prefetch=0, reduces_in_flight=0),
    "far_ahead": _plan("schedule", prefetch=3, backward_prefetch=2, reduces_in_flight=3),
    "reduce_scatter": _plan("reductions", reductions="reduce_scatter"),
    "own_messages": _plan("messages", own_message=0),
    "strided": _plan("messages", copy_out="strided"),
    "no_recompute": _plan("budget", recompute=False),
    # how it is trained
    "eager": Feature("backend", {"backend": ""}, without=("compiles", "loop", "around")),
    "compiled_blocks": Feature("compiles", {"compiles": "blocks"}, without=("compile_step",)),
    "compiled_function": Feature("compiles", {"compiles": "function"}, without=("compile_step",)),
    "dynamic": Feature("compiles", {"dynamic": True, "varies": True}),
    "compile_step": Feature("loop", {"loop": "compile_step"}),
    "overlap": Feature("loop", {"loop": "overlap"}),
    "in_backward": Feature("loop", {"loop": "in_backward"}),
    "compiled_optimizer": Feature("loop", {"loop": "compiled_optimizer"}),
    "adamw": Feature("optimizer", {"optimizer": "adamw"}),
    "foreach": Feature("optimizer", {"optimizer": "foreach"}),
    # Parts of flat parameters are no matrices.
    "two_optimizers": Feature("optimizer", {"optimizer": "two"}, without=FLAT),
    "muon": Feature("optimizer", {"optimizer": "muon"}, without=FLAT),
    "accumulate": Feature("micro", {"micro": "accumulate"}, without=("in_backward",)),
    "no_sync": Feature("micro", {"micro": "no_sync"}),
    "two_forwards": Feature("micro", {"micro": "two_forwards"}),
    # Gradients are used up in backward: said in `overlap_optimizer`, and not for this.
    "clip": Feature("clip", {"clip": 0.05}, without=("in_backward",)),
    "scaler": Feature("scaler", {"scaler": "finite"}, without=("in_backward",)),
    "overflow": Feature("scaler", {"scaler": "overflow"}, without=("in_backward",)),
    "scheduler": Feature("schedule of rates", {"has_schedule": True}),
    "freezing": Feature("between", {"between": "freezing"}),
    # Of parameters that are never updated there is no state, which torch misses when it loads.
    "checkpoint": Feature("between", {"between": "checkpoint"}, without=("unused",)),
    "state_dict": Feature("between", {"between": "state_dict"}),
    "evaluation": Feature("between", {"between": "evaluation"}),
    "dumped": Feature("around", {"is_dumped": True}),
    "inductor": Feature("backend", {"backend": "inductor"}),
}
SLOW = ("inductor",)  # half a minute each: those pairs are asked for by `--inductor`


def closed(names: Iterable[str]) -> frozenset[str]:
    """These with all that they need."""
    found = set(names)
    while more := {need for name in found for need in FEATURES[name].needs} - found:
        found |= more
    return frozenset(found)


def fit(names: Iterable[str]) -> bool:
    """Returns whether the features can be in one program."""
    all_names = closed(names)
    slots = [FEATURES[name].slot for name in all_names]
    if len(slots) != len(set(slots)):
        return False
    there = all_names.union(slots)
    return not any(there.intersection(FEATURES[name].without) for name in all_names)


@cache
def pairs(*, with_slow: bool = False) -> tuple[frozenset[str], ...]:
    """All pairs that fit."""
    names = [name for name in FEATURES if with_slow or name not in SLOW]
    return tuple(frozenset(pair) for pair in combinations(names, 2) if fit(pair))


def setting_of(names: Iterable[str]) -> Setting:
    """The program with these features."""
    setting, plan = Setting(), dict[str, Any]()
    for name in sorted(closed(names)):
        sets = dict(FEATURES[name].sets)
        plan.update(sets.pop("plan", {}))
        setting = replace(setting, **sets)
    return replace(setting, plan=plan)
