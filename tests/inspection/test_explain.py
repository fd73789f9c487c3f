"""`explain`: what it knows before, during and after; every option has a consumer, or is an
error.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from kit.extensions import Quantised
from kit.passes_harness import fake_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import compiled_fsdp
from compiled_fsdp import (
    Explanation,
    MixedPrecisionPolicy,
    Plan,
    UnusedOptionError,
    explain,
    fully_shard,
    overlap_optimizer,
    planned,
)
from compiled_fsdp.wire import runs

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    """A fake group, and nothing left of other tests' graphs."""
    monkeypatch.setattr(runs, "_runs", {})
    with fake_ranks(2), planned(bucket_bytes=Plan().bucket_bytes):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break(msg="asked for")
        return self.head(x)


def build(breaks: bool = False, **options: object) -> nn.Module:
    model = Model(breaks)
    for layer in (*model.layers, model.unused):
        fully_shard(layer, **options)
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    return fully_shard(model, mp_policy=replace(policy, output_dtype=policy.reduce_dtype))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="compiled_fsdp_eager")


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: int = 2) -> None:
    model(torch.ones(batch, 4)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def options_of(found: Explanation) -> dict[str, list[str]]:
    consumers: dict[str, list[str]] = {}
    for option in found.options:
        consumers.setdefault(option.name, []).extend(option.consumers)
    return consumers


# -- units


def test_before_anything_ran():
    found = explain(build(mp_policy=BF16))
    assert {unit.where for unit in found.units} == {"not run yet"}
    assert found.graphs == []
    assert str(found).splitlines()[0] == (
        "Model: 5 units, 16 parameters, 1032 bytes on 2 ranks together. Nothing has run yet: call "
        "this again after a step"
    )
    assert found.step.measured_seconds is None
    assert "step time not measured" in str(found)


def test_in_a_graph():
    """Units, their parameters, and the collectives that they share."""
    model = compiled(build(mp_policy=BF16, reshard_after_forward=True))
    with planned(bucket_bytes=600):  # two blocks of 76 parameters in bf16 have 304 bytes
        step(model)
    found = explain(model)
    units = {unit.name: unit for unit in found.units}
    assert {name: unit.where for name, unit in units.items()} == {
        "layers.0": "in a graph",
        "layers.1": "in a graph",
        "layers.2": "in a graph",
        "unused": "never gathered",
        "Model": "in a graph",
    }
    block = units["layers.1"]
    assert [(p.name, p.shape, p.dtype, p.num_bytes) for p in block.params] == [
        ("layers.1.up.weight", [8, 4], "float32", 128),
        ("layers.1.up.bias", [8], "float32", 32),
        ("layers.1.down.weight", [4, 8], "float32", 128),
        ("layers.1.down.bias", [4], "float32", 16),
    ]
    assert (block.num_bytes, block.compute_dtype, block.reshard, block.mesh, block.groups) == (
        304,
        "bfloat16",
        "gather",
        "sharded over 2",
        ["0"],
    )
    forward, backward = found.graphs
    assert [(g.kind, g.num_runs, g.is_fused) for g in found.graphs] == [
        ("forward", 1, False),
        ("backward", 1, False),
    ]
    assert [bucket["units"] for bucket in forward.gathers] == [
        ["layers.0", "layers.1", "layers.2"],
        ["Model"],
    ]
    assert [s.units for s in block.gathers if s.graph == 0] == [
        ["layers.0", "layers.1", "layers.2"]
    ]
    assert forward.gathers[0]["num_bytes"] == 3 * 76 * 2
    assert {name for bucket in backward.reductions for name in bucket["units"]} == {
        "layers.0",
        "layers.1",
        "layers.2",
        "Model",
    }
    assert [bucket["dtype"] for bucket in backward.reductions] == ["float32"] * len(
        backward.reductions
    )
    text = str(found)
    assert "  4 in a graph: layers.0 to layers.2, Model\n  1 never gathered: unused\n" in text
    assert (
        "\n  layers.1: as layers.0\n    all-gathers #0 of graph 0 (with layers.0, layers.2), "
        in text
    )


def test_eager_only():
    model = build()
    step(model)
    found = explain(model)
    units = {unit.name: unit for unit in found.units}
    assert {name for name, unit in units.items() if unit.where == "eager"} == {
        "layers.0",
        "layers.1",
        "layers.2",
        "Model",
    }
    assert units["Model"].why == ["the model is not compiled"]
    assert units["unused"].where == "never gathered"
    assert found.summary() == (
        "compiled_fsdp: Model of 5 units: 4 eager, 1 never gathered; more by "
        "compiled_fsdp.explain(model)"
    )


@pytest.mark.filterwarnings("ignore:compiled_fsdp")
def test_beside_graphs():
    """Why a unit ran eagerly: where Dynamo broke the graph, and by which words."""
    model = compiled(build(breaks=True))
    step(model)
    found = explain(model)
    units = {unit.name: unit for unit in found.units}
    assert units["Model"].where == "eager"
    assert len(units["Model"].why) == 1
    assert "asked for" in units["Model"].why[0]
    assert "test_explain.py:" in units["Model"].why[0]
    assert "(predictions are of the graphs alone)" in str(found) or not found.graphs


def test_ops_that_nobody_lowers():
    model = torch.compile(build(mp_policy=BF16), backend="aot_eager")
    with pytest.warns(UserWarning, match="without our passes"):
        step(model)
    found = explain(model)
    assert found.units[0].where == "in a graph, not lowered"
    assert options_of(found)["mp_policy.reduce_dtype"] == ["fsdp ops, not lowered"]


# -- options


def test_consumed_by_passes():
    model = build(mp_policy=BF16, reshard_after_forward=True)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    model.set_modules_to_backward_prefetch([model.layers[0]])
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_gradient_divide_factor(4.0)
    model.set_separate_reduce_scatter_group()
    with planned(prefetch=1, bucket_bytes=0):
        step(run := compiled(model))
        found = options_of(explain(run))
    assert found == {
        "mp_policy.param_dtype": ["lower"],
        "mp_policy.reduce_dtype": ["lower"],
        "mp_policy.output_dtype": ["forward hook"],
        "reshard_after_forward": ["reshard"],
        "set_modules_to_forward_prefetch": ["prefetch_all_gather"],
        "set_modules_to_backward_prefetch": ["prefetch_all_gather"],
        "set_reduce_scatter_max_input_buffers": ["delay_wait"],
        "set_gradient_divide_factor": ["lower"],
        "set_separate_reduce_scatter_group": ["lower"],
        "Plan.prefetch": ["prefetch_all_gather"],
        "Plan.bucket_bytes": ["bucket_all_gather", "bucket_reduce_scatter"],
    }


def test_a_budget_is_consumed():
    with planned(memory_budget=1.0):
        step(run := compiled(build()))
        assert options_of(explain(run)) == {"Plan.memory_budget": ["fit_budget"]}


def test_what_becomes_of_parameters():
    """As it is in the graphs, where that is not what was asked for."""
    for budget, told in (
        (None, "dropped after forward, gathered again in backward"),
        (1.0, "gathered for forward, not again in backward: memory_budget keeps it, or backward"),
        (0.5, "gathered for forward, not again in backward: memory_budget keeps it;"),
    ):
        with planned(memory_budget=budget, bucket_bytes=0):
            step(run := compiled(build(reshard_after_forward=True)))
            found = explain(run)
        assert told in str(found), (budget, str(found))
    values = found.as_dict()
    values["units"][0]["gathers"].append({"graph": 1, "number": 0, "units": ["layers.0"]})
    values["graphs"][1]["choices"][:] = [
        choice | {"is_kept": choice["name"] == "layers.0.up.weight"}
        for choice in values["graphs"][1]["choices"]
    ]
    told = "gathered again in backward, but for 1 that memory_budget keeps"
    assert told in str(Explanation.of_dict(values))


def test_consumed_by_the_eager_runtime():
    ignored = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].extra = ignored
    model[0].register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    fully_shard(model[0], mp_policy=policy, mesh=mesh)
    fully_shard(model[1], ignored_params=set(ignored.parameters()), reshard_after_forward=True)
    fully_shard(model[2], shard_placement_fn=lambda p: None)
    model[1].register_forward_pre_hook(lambda module, args: args[0].float())
    fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    model.set_reduce_scatter_unused_params(True)
    model.set_reshard_after_backward(False)
    model.set_unshard_in_backward(False)
    model.set_is_last_backward(False)
    step(model)
    found = options_of(explain(model))
    assert found == {
        "mesh": ["eager runtime"],
        "mp_policy.param_dtype": ["eager runtime"],
        "mp_policy.cast_forward_inputs": ["forward hook"],
        "ignored_params": ["fully_shard"],
        "reshard_after_forward": ["eager runtime"],
        "shard_placement_fn": ["fully_shard"],
        "set_modules_to_forward_prefetch": ["eager runtime"],
        "set_modules_to_backward_prefetch": ["eager runtime"],
        "set_reduce_scatter_unused_params": ["eager runtime"],
        "set_reshard_after_backward": ["eager runtime"],
        "set_unshard_in_backward": ["eager runtime"],
        "set_is_last_backward": ["eager runtime"],
    }


def test_overlap_is_consumed():
    model = build()
    optimizer = overlap_optimizer(model, torch.optim.SGD(model.parameters()))
    run = compiled(model)
    for _ in range(2):
        step(run, optimizer)
        optimizer.zero_grad()
    consumers = options_of(explain(run))["overlap_optimizer"]
    assert "leave_in_flight" in consumers


def test_overlap_is_used_if_one_unit_uses_it():
    """It is asked for once; of units with extensions no gather starts early, and only the last
    reductions are left in flight.
    """
    model = Model()
    for layer in model.layers:
        layer.up.weight = nn.Parameter(Quantised(layer.up.weight.detach().clone()))
        fully_shard(layer)
    fully_shard(model)
    optimizer = overlap_optimizer(model, torch.optim.SGD(model.parameters()))
    run = compiled(model)
    step(run, optimizer)
    found = [o for o in explain(run, strict=True).options if o.name == "overlap_optimizer"]
    assert {bool(option.consumers) for option in found} == {True, False}
    assert not any(option.unused for option in found)


def test_unused_options_raise():
    """An option that changed nothing, with a hint; the rest is in the error."""
    model = build()
    model.set_requires_all_reduce(False)
    with planned(prefetch=3):
        explain(model, strict=True)  # nothing had the chance yet
        step(model)
        found = explain(model)
        with pytest.raises(UnusedOptionError) as raised:
            explain(model, strict=True)
        assert str(raised.value) == (
            "explain: these options were set, a step has run since, and nothing took a decision "
            "from them, so they changed nothing:\n"
            "  set_requires_all_reduce=False of layers.0, layers.1, layers.2, Model (without a "
            "replicate axis (HSDP) there is no all-reduce)\n"
            "  Plan.prefetch=3 (a plan is for graphs: compile the model, before the step and after "
            "set_plan)\n"
            "Leave them out"
        )
        assert raised.value.explanation == found
        assert (
            "\n  Plan.prefetch=3 (a plan is for graphs: compile the model, before the step and "
            "after set_plan): changed nothing, although a step has run since" in str(found)
        )
        assert found.step.count == 0
        assert options_of(explain(model))["Plan.prefetch"] == []
        model.set_requires_all_reduce(True)
    explain(model, strict=True)  # the plan of now sets nothing that is unused


def test_what_concerns_gradients_of_frozen_units_is_not_unused():
    """One policy for all units, as with LoRA, and some of them wholly frozen: that their gradients
    would be reduced in fp32 is no mistake; it is said, in the graph and before it.
    """
    model = build(mp_policy=BF16)
    for module in (model.layers[1], model.unused, model.head):
        module.requires_grad_(False)
    model.set_requires_all_reduce(False)  # without a replicate axis, this is one
    says = "consumed by nothing, no parameter there requires a gradient"
    for run in (model, compiled(model)):
        step(run)
        with pytest.raises(UnusedOptionError) as raised:
            explain(run, strict=True)
        assert "reduce_dtype" not in str(raised.value)
        assert "set_requires_all_reduce=False of layers.0, layers.2 (" in str(raised.value)
        (found,) = [
            option
            for option in raised.value.explanation.options
            if option.name == "mp_policy.reduce_dtype" and "layers.1" in option.units
        ]
        assert not found.unused
        line = f"  mp_policy.reduce_dtype=torch.float32 of {', '.join(found.units)}: {says}\n"
        assert line in str(raised.value.explanation)


def test_an_option_set_since_the_last_step_is_not_unused():
    model = build()
    step(model)
    model.set_requires_all_reduce(False)
    assert options_of(explain(model)) == {"set_requires_all_reduce": []}


def test_another_value_is_another_option():
    """What consumed the old value has not consumed the new one."""
    model = build()
    model.set_gradient_divide_factor(4.0)
    run = compiled(model)
    step(run)
    assert options_of(explain(run))["set_gradient_divide_factor"] == ["lower"]
    model.set_gradient_divide_factor(8.0)
    assert options_of(explain(run))["set_gradient_divide_factor"] == []
    step(run)
    assert options_of(explain(run))["set_gradient_divide_factor"] == ["lower"]


# -- the step


def test_predicted_and_measured():
    """Peak by the memory model; times by the planner if the plan has costs; measured ones from the
    optimizer and a profile.
    """
    costs = compiled_fsdp.Costs(1e9, 1e9, 1e-6, (("0", compiled_fsdp.Link(1e-3, 1e6)),))
    model = compiled(build())
    optimizer = torch.optim.SGD(model.parameters())
    with planned(costs=costs):
        step(model, optimizer)
        found = explain(model)
        assert found.step.predicted_seconds == pytest.approx(
            sum(g.predicted["total"] for g in found.graphs)
        )
        assert found.step.predicted_exposed > 0
        assert found.step.predicted_peak == max(g.peak for g in found.graphs) > 0
        assert found.step.measured_seconds is None
        assert options_of(found)["Plan.costs"] == ["predictions"]
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(2):
            step(model, optimizer)
    found = explain(model, profile=profile)
    assert found.step.count == 3
    assert 0 < found.step.profiled_exposed < found.step.profiled_seconds
    assert found.step.measured_peak > 0
    assert "measured:  step time" in str(found)
    assert "ms (median of the last of 3 steps); peak" in str(found)
    assert re.search(r"profiled:  step time .* ms, of which .* ms \(.*%\) wait for", str(found))


def test_recompiles_have_reasons():
    model = compiled(build())
    step(model)
    assert explain(model).recompiles == []
    step(model, batch=3)
    found = explain(model)
    assert len(found.recompiles) == 1
    assert "size mismatch at index 0. expected 2, actual 3" in found.recompiles[0]["reason"]
    assert found.recompiles[0]["reason"] in str(found)


def test_as_json():
    model = compiled(build(mp_policy=BF16))
    step(model, torch.optim.SGD(model.parameters()))
    found = explain(model)
    text = json.dumps(found.as_dict())
    again = Explanation.of_dict(json.loads(text))
    assert again == found
    assert str(again) == str(found)


def test_bad_arguments():
    with pytest.raises(
        TypeError, match=r"^explain: Linear.* has no sharded module\. Call fully_shard on it first$"
    ):
        explain(nn.Linear(1, 1))
    with pytest.raises(
        TypeError, match=r"^explain: profile is 3; should be a torch\.profiler\.profile, or None$"
    ):
        explain(build(), profile=3)
    with (
        torch.profiler.profile() as profile,
        pytest.raises(TypeError, match=r"^explain: the profile has no results; leave its"),
    ):
        explain(build(), profile=profile)


# -- the summary


@pytest.fixture
def stderr_of(capsys, no_progress):
    """What the summary writes where no handler is installed, as in a program that knows nothing of
    logging. torch 2.15 writes lines of its own, of what it traces, in the first compilation.
    """

    def read() -> str:
        lines = capsys.readouterr().err.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[rank0]:V"))

    with mock.patch.object(logging.getLogger("compiled_fsdp"), "hasHandlers", return_value=False):
        yield read


def test_one_summary_after_the_first_step(stderr_of):
    model = compiled(build())
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    assert stderr_of() == ""
    for _ in range(3):
        step(model, optimizer)
    assert stderr_of() == (
        "compiled_fsdp: Model of 5 units: 4 in a graph, 1 never gathered; 2 graphs of 3 "
        f"all-gathers and 1 reductions, {explain(model).summary().split('reductions, ')[1]}\n"
    )


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_the_summary_can_be_silenced(level, stderr_of):
    logger = logging.getLogger("compiled_fsdp")
    before = logger.level
    logger.setLevel(level)
    try:
        model = build()
        step(model, torch.optim.SGD(model.parameters()))
    finally:
        logger.setLevel(before)
    assert stderr_of() == ""


def test_only_rank_0_sums_up(stderr_of):
    model = build()
    with mock.patch("compiled_fsdp.inspection.collect.dist.get_rank", return_value=1):
        step(model, torch.optim.SGD(model.parameters()))
    assert stderr_of() == ""
