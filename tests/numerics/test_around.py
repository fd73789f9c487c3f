"""What stands around a compiled unit, or is computed with its parameters, and is autograd's or
torch's own: hooks for saved tensors, checkpoints of a compiled call, ops with effects.
"""

from __future__ import annotations

import abc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from kit.beside import Net, Side, beside
from kit.harness import SLOW
from kit.oracle import message
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


# -- hooks for saved tensors: what backward gets is not the flat buffer itself


def checkpoint_of_model(side: Side) -> None:
    model = side.shard(Net(), "a", "b")
    call = side.compile(model)
    side.train(lambda x: checkpoint(call, x, use_reentrant=False), model)


def checkpoint_of_wrapper(side: Side) -> None:
    model = side.wrap(Net(), "a", "b")
    call = side.compile(model)
    side.train(lambda x: checkpoint(call, x, use_reentrant=False), model)


def wrapped_blocks(side: Side) -> None:
    """Blocks are compiled, and then wrapped."""
    model = Net()
    for name in ("a", "b"):
        layer = side.shard(model.get_submodule(name))
        if side.kind == "compiled":
            layer.compile(backend="compiled_fsdp_eager")
        setattr(model, name, checkpoint_wrapper(layer))
    side.train(side.shard(model), model)


def aliases(side: Side) -> None:
    model = side.shard(Net(), "a", "b")
    call = side.compile(model)

    def run(x: Tensor) -> Any:
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return call(x)

    side.train(run, model)


def early_stops(side: Side) -> None:
    """What is computed again ends by an exception of torch's own, of which nothing is said."""
    model = side.shard(Net(), "a", "b")
    call = side.compile(model)
    optimizer = side.sgd(model.parameters())
    for step in range(4):
        if side.is_ours:
            model.set_requires_gradient_sync(step % 2 == 1)
        loss = checkpoint(call, side.batch(step), use_reentrant=False).square().mean()
        side.note("loss", loss)
        texts = said(loss.backward)
        assert not any("an exception left a forward" in text for text in texts)
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "script",
    [checkpoint_of_model, checkpoint_of_wrapper, wrapped_blocks, aliases, early_stops],
    ids=lambda script: script.__name__,
)
def test_hooks_for_saved_tensors(two: Pool, script: Any) -> None:
    two.run(beside, script)


def test_a_copied_buffer_is_refused(two: Pool) -> None:
    two.run(copied)


def copied() -> None:
    side = Side("compiled")
    call = side.compile(side.shard(Net(), "a", "b"))
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = call(side.batch(0)).sum()
    text = message(loss.backward)
    assert "no unit owns the flat buffer" in text
    assert "Hooks for saved tensors (save_on_cpu) copy it" in text


# -- hooks on parameters: autograd computes no gradient of what is sharded


def halve(grad: Tensor) -> Tensor:
    return grad * 0.5


def hooked(side: Side, is_wrapped: bool, when: str) -> list[str]:
    model = Net()
    if when == "before":
        model.b.weight.register_hook(halve)
    model = side.wrap(model) if is_wrapped else side.shard(model)
    if when == "after":
        next(model.parameters()).register_hook(halve)
    return said(lambda: side.compile(model)(side.batch(0)).sum().backward())


def said(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


HOOKS = {
    "before": "hooks that were registered on b.weight before it was sharded are never called",
    "after": "hooks of register_hook on a.weight are never called",
}


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("when", HOOKS)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["fully_shard", "wrapper"])
def test_hooks_that_nobody_calls_are_announced(
    two: Pool, is_wrapped: bool, when: str, kind: str
) -> None:
    two.run(announced, is_wrapped, when, kind)


def announced(is_wrapped: bool, when: str, kind: str) -> None:
    texts: list[str] = []
    texts += said(lambda: texts.extend(hooked(Side(kind), is_wrapped, when)))
    expected = "hooks on parameters of a FullyShardedData" if is_wrapped else HOOKS[when]
    if dist.get_rank() == 0:
        assert any(expected in text for text in texts), texts


def test_hooks_after_accumulation_are_called_and_nothing_is_said(two: Pool) -> None:
    two.run(called)


def called() -> None:
    for kind in ("eager", "compiled"):
        side, seen = Side(kind), []
        model = side.shard(Net(), "a", "b")
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(seen.append)
        texts = said(lambda side=side, m=model: side.compile(m)(side.batch(0)).sum().backward())
        assert len(seen) == 6
        assert not any("hooks" in text for text in texts)


# -- ops with effects: a graph has tokens, which are None where it runs


def orthogonal(side: Side) -> None:
    """`linalg.solve` in forward, which checks for errors, in two units."""
    model = Net()
    for layer in (model.a, model.b):
        nn.utils.parametrizations.orthogonal(layer, orthogonal_map="cayley")
    side.train(side.compile(side.shard(model, "b"), fullgraph=True), model)


def test_ops_with_effects(two: Pool) -> None:
    two.run(beside, orthogonal)


def test_ops_with_effects_by_inductor(two: Pool) -> None:
    two.run(by_inductor, timeout=SLOW)


def by_inductor() -> None:
    beside(orthogonal, kinds=("inductor",))


# -- parametrizations that are taken away again


class Abstract(nn.Linear, abc.ABC):
    """Of another metaclass than `type`."""


def unparametrized(side: Side, units: tuple[str, ...], kind: type[nn.Linear]) -> None:
    """To export: the layer has the class that it had before."""
    model = Net()
    model.a = kind(model.a.in_features, model.a.out_features)
    nn.utils.parametrizations.weight_norm(model.a)
    model = side.shard(model, *units)
    side.train(side.compile(model, fullgraph=True), model)
    nn.utils.parametrize.remove_parametrizations(model.a, "weight")
    assert isinstance(model.a, nn.Linear)
    assert not nn.utils.parametrize.is_parametrized(model.a)
    is_unit = side.is_ours and "a" in units
    assert type(model.a).__name__ == f"{'FSDP' if is_unit else ''}{kind.__name__}"
    assert isinstance(model.a, FSDPModule) == is_unit
    side.note_params(model)
    for name, value in model.state_dict().items():
        side.note(name, value)


@pytest.mark.parametrize("kind", [nn.Linear, Abstract])
@pytest.mark.parametrize("units", [("b",), ("a", "b")], ids="+".join)
def test_parametrizations_that_are_removed(
    two: Pool, units: tuple[str, ...], kind: type[nn.Linear]
) -> None:
    """Stock's refuses where the layer is a unit of its own."""
    two.run(beside, unparametrized, units, kind)


# -- numbers of a list that differ from call to call


class Skipping(Net):
    def forward(self, x: Tensor, layers: Any = (0, 1)) -> Tensor:
        for i, layer in enumerate((self.a, self.b)):
            if i in layers:
                x = layer(x).tanh()
            if 2.0 in layers or "a" in layers:
                x = x + 1.0
            if (1, 3) in [tuple(layers)] or (True in layers) is (2 in layers):
                x = x * 2.0
        result: Tensor = self.c(x)
        return result


def skipping(side: Side) -> None:
    model = side.shard(Skipping(), "a", "b")
    call = side.compile(model, fullgraph=True)
    named = ([0, 1], [0, 2], [1, 3], [1], [2], [3, 0, 1], (1, 0))
    of_step = iter(named)
    side.train(lambda x: call(x, next(of_step)), model, len(named))


def test_layers_that_a_list_names(two: Pool) -> None:
    """Until 2.13 torch's Dynamo takes `1 in layers` for False where these are symbols."""
    two.run(beside, skipping)
