"""Slips that people make in their first hour: each error names what was done, to what, and what to
do.
"""

from __future__ import annotations

import copy
import operator
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as StockFSDP
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.func import functional_call

from compiled_fsdp import (
    FullyShardedDataParallel,
    Plan,
    current_plan,
    errors,
    explain,
    fully_shard,
    planned,
    set_plan,
)
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.inspection.guards import in_words
from compiled_fsdp.planning.plan import options as plan_options
from compiled_fsdp.planning.plan import use
from compiled_fsdp.wire import runs

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(model: nn.Module, blocks: Callable[..., Any] = fully_shard) -> nn.Module:
    for layer in model.layers:
        blocks(layer)
    return fully_shard(model)


def called(model: nn.Module) -> None:
    torch.compile(model, backend="compiled_fsdp_eager")(torch.ones(2, 4))


def called_as_method(model: nn.Module) -> None:
    model.compile(backend="compiled_fsdp_eager")
    model(torch.ones(2, 4))


def called_in_a_function(model: nn.Module) -> None:
    torch.compile(lambda x: model(x).sum(), backend="compiled_fsdp_eager")(torch.ones(2, 4))


@pytest.mark.usefixtures("fake_world")
class TestMeta:
    @pytest.mark.parametrize("call", [called, called_as_method, called_in_a_function])
    def test_the_eager_text_before_dynamo_s(self, call: Callable[[nn.Module], None]) -> None:
        torch._dynamo.reset()
        with torch.device("meta"):
            model = sharded(Net())
        with pytest.raises(Exception, match=r"^(RuntimeError: )?unshard of layers\.0") as raised:
            call(model)
        assert (
            "parameters layers.0.weight, layers.0.bias are on the meta device and have no "
            "values to gather. Call module.to_empty(device=...)" in str(raised.value)
        )
        assert len(str(raised.value).splitlines()) < 20

    def test_it_runs_once_there_are_values(self) -> None:
        torch._dynamo.reset()
        with torch.device("meta"):
            model = sharded(Net())
        with pytest.raises(RuntimeError, match="on the meta device"):
            called(model)
        model.to_empty(device="cpu")
        called(model)


@pytest.mark.usefixtures("fake_world")
class TestOrder:
    def test_root_before_its_blocks(self) -> None:
        model = fully_shard(Net())
        with pytest.raises(
            RuntimeError,
            match=r"^fully_shard: parameter weight of Linear is layers\.0\.weight of the unit "
            r"'Net' already, which was sharded before what is inside it\. Call fully_shard from "
            "the inside out",
        ):
            fully_shard(model.layers[0])

    def test_what_the_outer_unit_ignores_can_be_sharded(self) -> None:
        model = Net()
        fully_shard(model, ignored_params=set(model.layers[0].parameters()))
        fully_shard(model.layers[0])


def in_wrapper(module: nn.Module) -> nn.Module:
    """Torch's FSDP1 around it."""
    return StockFSDP(module, device_id=torch.device("cpu"), use_orig_params=True)


def in_ours(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def with_blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Net()
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(layer)
    return model


def layers_by(name: str) -> str:
    """What is said of blocks that one of torch's two names has sharded."""
    return (
        r"modules layers\.0, layers\.1, layers\.2 were sharded by "
        rf"torch\.distributed\.fsdp\.{name}\. One model cannot have units of both\. Import {name} "
        r"from compiled_fsdp alone, or call compiled_fsdp\.replace_stock\(\) before anything else "
        r"is imported\. Nothing was changed"
    )


@pytest.mark.usefixtures("fake_world")
class TestStockBesideOurs:
    BOTH = "One model cannot have units of both"

    @pytest.mark.parametrize(
        ("ours", "theirs", "name"),
        [
            (fully_shard, stock_fully_shard, "fully_shard"),
            (fully_shard, in_wrapper, "FullyShardedDataParallel"),
            (in_ours, stock_fully_shard, "fully_shard"),
            (in_ours, in_wrapper, "FullyShardedDataParallel"),
        ],
    )
    def test_their_blocks(
        self,
        ours: Callable[[nn.Module], nn.Module],
        theirs: Callable[[nn.Module], nn.Module],
        name: str,
    ) -> None:
        model = with_blocks(theirs)
        before, kind = list(model.parameters()), type(model)
        with pytest.raises(RuntimeError, match=rf"^\w+: {layers_by(name)}"):
            ours(model)
        assert type(model) is kind
        assert all(map(operator.is_, model.parameters(), before))

    def test_one_of_their_blocks_alone_is_named(self) -> None:
        model = Net()
        stock_fully_shard(model.layers[1])
        with pytest.raises(RuntimeError, match=r"^fully_shard: module 'layers\.1' was sharded by "):
            fully_shard(model)

    def test_their_blocks_among_the_ignored(self) -> None:
        model = Net()
        stock_fully_shard(model.layers[1])
        fully_shard(model, ignored_params=set(model.layers[1].parameters()))

    def test_their_root_first(self) -> None:
        model = stock_fully_shard(Net())
        with pytest.raises(
            RuntimeError,
            match=r"parameter weight of Linear was sharded by a call on a module around it.*"
            rf"{self.BOTH}",
        ):
            fully_shard(model.layers[0])

    def test_their_root_last(self) -> None:
        model = Net()
        for layer in model.layers:
            fully_shard(layer)
        stock_fully_shard(model)
        with pytest.raises(
            RuntimeError, match=rf"fully_shard was called on a module around 'Linear'.*{self.BOTH}"
        ):
            model(torch.ones(2, 4))

    def test_their_root_around_our_wrappers(self) -> None:
        model = with_blocks(in_ours)
        stock_fully_shard(model)
        with pytest.raises(
            RuntimeError, match=rf"^Linear: its parameters were sharded again, .*{self.BOTH}"
        ):
            model(torch.ones(2, 4))

    @pytest.mark.parametrize("around", [in_wrapper, in_ours])
    def test_a_wrapper_around_our_blocks(self, around: Callable[[nn.Module], nn.Module]) -> None:
        model = with_blocks(fully_shard)
        with pytest.raises(
            RuntimeError,
            match=r"^FullyShardedDataParallel was called on a module around 'Linear', which "
            r"compiled_fsdp\.fully_shard had sharded\. Use one of the two",
        ):
            around(model)
        fully_shard(model)(torch.ones(2, 4)).sum().backward()  # nothing was lost


class TestErrorsOfTorch:
    def test_no_process_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not dist.is_initialized()
        monkeypatch.delenv("RANK", raising=False)
        # Torch names a group that it does not make: later tests' would be called otherwise.
        monkeypatch.setattr(dist.distributed_c10d._world, "group_count", 0)
        with pytest.raises(ValueError, match=r"there is no process group.*RANK.*torchrun"):
            fully_shard(nn.Linear(4, 4))

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without one")
    def test_a_mesh_of_another_device(self, fake_world: None) -> None:
        mesh = init_device_mesh("cuda", (2,))
        with pytest.raises(
            RuntimeError, match=r"the mesh .* is on cuda, and this process sees no such device"
        ):
            fully_shard(nn.Linear(4, 4), mesh=mesh)

    def test_a_full_state_dict(self, fake_world: None) -> None:
        model, full = sharded(Net()), Net().state_dict()
        with pytest.raises(
            RuntimeError,
            match=r"Net:\s+load_state_dict: layers\.0\.weight, layers\.0\.bias are full tensors, "
            "and the model's parameters are shards of them.*set_model_state_dict",
        ):
            model.load_state_dict(full)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, full, options=options)
        model.load_state_dict(model.state_dict())

    def test_a_full_optimizer_state(self, fake_world: None) -> None:
        whole, model = Net(), sharded(Net())
        theirs, ours = torch.optim.AdamW(whole.parameters()), torch.optim.AdamW(model.parameters())
        for net, optimizer in ((whole, theirs), (model, ours)):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        ours.load_state_dict(theirs.state_dict())
        with pytest.raises(
            RuntimeError,
            match=r"^AdamW\.step: the state exp_avg, exp_avg_sq of a parameter of shape "
            r"\(4, 4\) is a full tensor, and the parameter a shard.*set_optimizer_state_dict",
        ):
            ours.step()

    def test_fsdp1_without_an_accelerator(self, fake_world: None) -> None:
        with (
            mock.patch("torch.accelerator.is_available", return_value=False),
            pytest.raises(
                RuntimeError, match=r"(?s)^FSDP needs a non-CPU .*\nOn a CPU, pass device"
            ),
        ):
            FullyShardedDataParallel(Net())

    def test_a_deep_copy_of_fsdp1(self, fake_world: None) -> None:
        """Torch says "cannot pickle 'module' object"."""
        model = in_ours(Net())
        for copied in (model, nn.Sequential(model)):
            with pytest.raises(TypeError, match=r"^FullyShardedDataParallel: copy\.deepcopy of a "):
                copy.deepcopy(copied)

    def test_fsdp1_without_a_process_group(self) -> None:
        with pytest.raises(ValueError, match=r"(?s)not been initialized.*\nStart .* torchrun"):
            FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))


def test_lists_end_after_three_names() -> None:
    assert shortened(["a", "b", "c"]) == "a, b, c"
    assert shortened(["a", "b", "c"], 1) == "a and 2 more"
    assert shortened([f"layers.{n}" for n in range(12)]) == (
        "layers.0, layers.1, layers.2 and 9 more"
    )


class TestPlans:
    def test_a_budget_of_one_byte(self) -> None:
        """1 is not 1.0."""
        with pytest.raises(ValueError, match=r"memory_budget=1 is an int, so 1 bytes .*a float"):
            Plan(memory_budget=1)
        assert Plan(memory_budget=1 << 20).memory_budget == 1 << 20
        assert Plan(memory_budget=1.0).memory_budget == 1.0

    def test_auto_is_taken_and_printed(self) -> None:
        plan = Plan(prefetch="auto", bucket_bytes="auto", reductions="auto", copy_out=None)
        assert plan == Plan(prefetch=None, bucket_bytes=None, reductions=None, copy_out=None)
        text = repr(plan)
        for name in ("prefetch", "bucket_bytes", "reductions", "copy_out"):
            assert f"{name}='auto'" in text
        assert "memory_budget=None" in text
        assert eval(text, {"Plan": Plan}) == plan
        assert plan.is_from_costs
        with pytest.raises(ValueError, match=r"reductions='ring'; should be one of .*'auto' for"):
            Plan(reductions="ring")
        with pytest.raises(ValueError, match="memory_budget='auto'; should be bytes"):
            Plan(memory_budget="auto")

    def test_explain_says_auto(self, fake_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "_runs", {})
        with mock.patch.dict(plan_options.consumed, clear=True), planned(prefetch="auto"):
            text = str(explain(sharded(Net())))
        assert "Plan.prefetch='auto': consumed by nothing yet" in text

    def test_set_after_compiling_warns(
        self, fake_world: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch._dynamo.reset()
        monkeypatch.setattr(runs, "_runs", {})
        before = current_plan()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_plan(replace(before, prefetch=1))
            called(sharded(Net()))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_plan(current_plan())  # nothing changes
                with planned(prefetch=3):
                    pass
            with pytest.warns(UserWarning, match="set_plan was called after graphs were compiled"):
                set_plan(replace(before, prefetch=2))
        finally:
            use(before)
            plan_options.asked.pop("Plan.prefetch", None)

    def test_a_plan_that_a_with_undoes(self, fake_world: None) -> None:
        before = current_plan()
        with planned(prefetch=3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_plan(current_plan())  # nothing changes
            with pytest.warns(UserWarning, match=r"inside `with planned\(\.\.\.\)`"):
                set_plan(replace(before, prefetch=5))
            assert current_plan().prefetch == 5
        assert current_plan() == before


class TestWarnings:
    def test_once_at_the_line_of_the_user(self, fake_world: None) -> None:
        torch._dynamo.reset()
        model = sharded(Net())
        run = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                run(torch.ones(2, 4)).sum().backward()
        ours = [w for w in told if str(w.message).startswith("compiled_fsdp")]
        assert len(ours) == 1
        assert ours[0].filename == __file__

    def test_on_rank_0(self, fake_world: None, caplog: pytest.LogCaptureFixture) -> None:
        with (
            mock.patch.object(errors, "_on_every_rank", False),
            mock.patch("torch.distributed.get_rank", return_value=1),
            warnings.catch_warnings(record=True) as told,
        ):
            caplog.set_level("INFO", "compiled_fsdp")
            warn_once("compiled_fsdp: something")
        assert told == []
        assert "compiled_fsdp: something" in caplog.messages
        errors._said.clear()
        with pytest.warns(UserWarning, match="something"):
            warn_once("compiled_fsdp: something")

    @pytest.mark.parametrize("rank", [0, 1])
    def test_as_errors_on_all_ranks(self, fake_world: None, rank: int) -> None:
        """One that goes on would wait for those that do not."""
        with (
            mock.patch.object(errors, "_on_every_rank", False),
            mock.patch("torch.distributed.get_rank", return_value=rank),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            for _ in range(2):
                with pytest.raises(UserWarning, match="something"):
                    warn_once("compiled_fsdp: something")


class TestRecompiles:
    """Dynamo's guards on what is ours, in words, and without the stack that torch adds."""

    def test_settings_freezing_and_modes(self, fake_world: None) -> None:
        torch._dynamo.reset()
        run = torch.compile(model := sharded(Net()), backend="compiled_fsdp_eager")

        def step() -> None:
            run(torch.ones(2, 4)).sum().backward()

        model.set_requires_gradient_sync(False)
        step()
        model.set_requires_gradient_sync(True)
        step()
        model.layers[0].weight.requires_grad_(False)
        step()
        with torch.no_grad():
            run(torch.ones(2, 4))
        reasons = [entry["reason"].partition(": ")[2] for entry in explain(run).recompiles]
        assert reasons[0].startswith(
            "what the unit of parameter 'head.bias' is set to do is another than when it was "
            "compiled (set_requires_gradient_sync, "
        )
        frozen = (
            "parameter 'layers.0.weight' was frozen, or is trained again (requires_grad), or its"
        )
        assert any(text.startswith(frozen) for text in reasons)
        assert any(text.startswith("it was compiled with gradients and is") for text in reasons)
        assert not any("handle" in text or "\n" in text for text in reasons)

    @pytest.mark.parametrize(
        ("guard", "words"),
        [
            (
                "self._modules['layers']._modules['0']._fsdp_handles['weight'].flat is x",
                "parameter 'layers.0.weight' lies in another buffer: parameters of its unit were",
            ),
            (
                "self.__dict__['_modules']['_fsdp_wrapped_module']._modules['head']"
                "._fsdp_handles['bias'].is_frozen == False  # full",
                "parameter 'head.bias' was frozen, or is trained again (requires_grad)",
            ),
            (
                "self._modules['head']._fsdp_handles['bias'].is_plain == True  # if handle",
                "parameter 'head.bias' was frozen, or is trained again (requires_grad), or its "
                "full",
            ),
            (
                "not self._modules['layers']._modules['0']._parameters.replaced  # and name",
                "a parameter of module 'layers.0' was replaced by another tensor, or put back",
            ),
            (
                "self._modules['drop'].training == True  # return F.dropout",
                "module 'drop' was compiled in training mode and is called in evaluation mode",
            ),
            (
                "GLOBAL_STATE changed: autocast(cpu)_enabled",
                "it was compiled under torch.autocast and is called without",
            ),
        ],
    )
    def test_each_guard(self, guard: str, words: str) -> None:
        assert in_words(f"1/0: {guard}").startswith(f"1/0: {words}")

    def test_evaluation(self, fake_world: None) -> None:
        torch._dynamo.reset()
        run = torch.compile(
            fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Dropout())), backend="compiled_fsdp_eager"
        )
        run(torch.ones(2, 4))
        run.eval()
        run(torch.ones(2, 4))
        (reason,) = [entry["reason"].partition(": ")[2] for entry in explain(run).recompiles]
        assert reason.startswith("module '1' was compiled in training mode")

    def test_those_of_others_stay(self) -> None:
        text = "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3"
        assert in_words(f"{text}\nUser stack trace:\n  File") == text
        assert in_words("something else") == "something else"


@pytest.mark.usefixtures("fake_world")
def test_sharded_values_in_the_place_of_parameters() -> None:
    """Nothing gathers what is computed from sharded parameters."""
    model = sharded(Net())
    scaled = {name: p * 0.9 for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError) as raised:
        functional_call(model, scaled, (torch.ones(2, 4),))
    text = str(raised.value)
    assert "layers.0.weight, layers.0.bias" in text
    assert "has put in the place of the units' own, and nothing gathers these" in text
    assert "full_tensor()" in text
    assert "another unit" not in text


@pytest.mark.usefixtures("fake_world")
def test_a_converted_model_was_not_assigned_to() -> None:
    """What `model.double()` makes may have the address of what it replaced."""
    model = sharded(Net())
    params = [
        p for runtime in get_state(model).runtime.tree.in_order() for p in runtime.unit.params
    ]
    assert not any([p.was_data_assigned() for p in params])
    for _ in range(20):
        model.double()
        model.float()
        assert not any([p.was_data_assigned() for p in params])
    params[1].sharded.data = params[1].sharded * 2.0
    assert [p.was_data_assigned() for p in params].index(True) == 1


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_gradient_that_is_no_dtensor(is_compiled: bool) -> None:
    """Assigned by a loop that looks at whole gradients, and then adds up more."""
    torch._dynamo.reset()
    model: Any = sharded(Net())
    call = torch.compile(model, backend="compiled_fsdp_eager") if is_compiled else model
    call(torch.ones(2, 4)).sum().backward()
    weight = model.layers[0].weight
    weight.grad = torch.zeros(weight.shape)
    with pytest.raises(
        AssertionError,
        match=r"^a gradient of layers\.0\.weight is reduced and to be added to its \.grad, which "
        r"is a Tensor that somebody has assigned.*another name, or call zero_grad\(\)",
    ):
        call(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("fake_world")
def test_exact_names_of_a_model_without_parameters() -> None:
    with planned(gather_quantized=torch.int8, exact=("head.*",)), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"matches \['head\.\*'\]\. Names are those of"):
            fully_shard(nn.Sequential(nn.ReLU()))(torch.ones(2, 4))
