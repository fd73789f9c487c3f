"""`compile_step(accumulate=n)`: several micro-batches in one graph, with the loop's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import check_equal
from kit.harness import BACKENDS, ROUNDING, SLOW, Options, batch_of
from kit.models import loss_of
from kit.overlap import BF16, OPTIMIZERS, Run, start
from torch import nn

import compiled_fsdp
from compiled_fsdp import compile_step, explain, fully_shard, planned
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import current_plan

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch.fx import GraphModule

STEPS = 2


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def looped(
    run: Run, options: Options, count: int, *, once: bool, same: bool = False
) -> list[float]:
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for i in range(count):
            if once:
                run.model.set_requires_gradient_sync(i == count - 1)
            loss = loss_fn(run.model, *batches(options, count, step, same=same)[i]) / count
            loss.backward()
            total = total + loss.detach()
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), options.max_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(float(total))
    return losses


def whole(
    options: Options, count: int, optimizer: Any, kind: str = "compiled", **more: Any
) -> tuple[Run, Any]:
    run = start(False, "eager", options, optimizer)
    backend = BACKENDS[kind].replace("inductor", "compiled_fsdp")
    step = compile_step(
        run.model,
        run.optimizer,
        loss_fn,
        clip=options.max_norm,
        accumulate=count,
        backend=backend,
        **more,
    )
    return run, step


def batches(options: Options, count: int, step: int, *, same: bool = False) -> list[Any]:
    """Micro-batches of a step; of the same tensors, if asked for."""
    found = [batch_of(options.model, step * count + i) for i in range(count)]
    return found[:1] * count if same else found


def compare(
    options: Options,
    *,
    count: int = 2,
    once: bool = False,
    same: bool = False,
    optimizer: str = "adamw",
    kind: str = "compiled",
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Losses, parameters, buffers and the optimizer's state, of the step and of the loop."""
    loop = start(False, "eager", options, OPTIMIZERS[optimizer])
    wanted = looped(loop, options, count, once=once, same=same)
    run, step = whole(options, count, OPTIMIZERS[optimizer], kind, reduce_once=once)
    losses = [step(batches(options, count, i, same=same)).item() for i in range(STEPS)]
    what = f"{kind}, {options}, once {once}"
    # What shares a gather is not gathered ahead, nor what comes behind a unit of two buffers.
    stays = current_plan().bucket_bytes != 0 or "frozen" in options.model
    assert (run.num_ahead() > 0) != stays
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    check_equal(losses, wanted, f"losses, {what}", rtol, atol)
    check_equal(run.state(), loop.state(), f"state, {what}", rtol, atol)
    buffers = [dict(r.model.named_buffers()) for r in (run, loop)]
    check_equal(*buffers, f"buffers, {what}", rtol, atol)


def compare_each() -> None:
    compare(Options("tied", reshard=True, max_norm=0.1), count=3)
    with planned(bucket_bytes=1 << 20):  # units share collectives
        compare(Options("odd", max_norm=0.05), optimizer="sgd")
    with planned(split_bytes=500):  # units are reduced in parts
        compare(Options("odd", max_norm=0.05), optimizer="sgd")
        compare(Options("odd"), same=True)
    compare(Options("conv", reshard=False))
    compare(Options("deep frozen"))


def compare_once() -> None:
    compare(Options("unused", reshard=True, max_norm=0.05, policies=(BF16,)), once=True)
    compare(Options("called_twice"), once=True)


def test_reduced_each(two: Pool) -> None:
    """Bit for bit: clipping, tied and frozen parameters, buffers, parameters that stay."""
    two.run(compare_each, timeout=SLOW)


def test_reduced_once(two: Pool) -> None:
    """The same of `set_requires_gradient_sync(False)` in all but the last; mixed precision."""
    two.run(compare_once, timeout=SLOW)


def compare_meshes() -> None:
    compare(Options("odd", mesh="hsdp"))
    compare(Options("gpt_of_one_layer", reshard=2), once=True)


def test_meshes(four: Pool) -> None:
    four.run(compare_meshes, timeout=SLOW)


def compare_inductor() -> None:
    rtol, atol = ROUNDING  # a graph of all halves is fused otherwise than each for itself
    compare(
        Options("odd", max_norm=0.1),
        count=2,
        optimizer="sgd",
        kind="inductor",
        rtol=rtol,
        atol=atol,
    )


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


def orders() -> tuple[list[tuple[str, int]], list[tuple[str, int]], str]:
    """What is communicated for which micro-batch, in order; reduced for each, and once."""
    found = []
    options = Options("odd", reshard=True)
    for once in (False, True):
        seen: list[tuple[str, int]] = []

        def note(gm: GraphModule, _: Any, seen: list[tuple[str, int]] = seen) -> None:
            regions = find_regions(gm.graph, "gather") + find_regions(gm.graph, "reduce")
            position = {node: i for i, node in enumerate(gm.graph.nodes)}
            for region in sorted(regions, key=lambda r: position[r.starts[0]]):
                kind = "again" if region.spec.reshard == "again" else region.tag.kind
                seen.append((kind, region.spec.batch))

        with compiled_fsdp.pipeline(note, before="verify"), planned(prefetch=0):
            run, step = whole(options, 2, OPTIMIZERS["sgd"], reduce_once=once)
            step(batches(options, 2, 0))
        found.append(seen)
    return found[0], found[1], str(explain(run.model))


def test_order(two: Pool) -> None:
    """Each backward stands behind its forward, so that the activations of one are alive at a time;
    what is reduced once is so at the end.
    """
    each, once, text = two.run(orders)[0]
    assert [batch for _, batch in each] == sorted(batch for _, batch in each)
    assert each.count(("reduce", 0)) == each.count(("reduce", 1)) > 1
    assert {batch for kind, batch in once if kind == "again"} == {0, 1}
    assert once.count(("reduce", 0)) == each.count(("reduce", 0))
    assert [kind for kind, _ in once].index("reduce") > once.index(("gather", 1))
    assert "step:" in text


def budgeted() -> list[tuple[int, int]]:
    """The peak of the graph, and bytes that it gathers, with everything dropped, with everything
    kept, and within a budget between; the numbers are those of the loop. A share is one of peaks as
    the planner's model has them, which knows nothing of what moves at them.
    """
    options, found = Options("deep", reshard=True), []
    wanted = looped(loop := start(False, "eager", options), options, 2, once=False)
    for budget in (0.0, 1.0, 0.5):
        measured: list[tuple[int, int]] = []

        def measure(gm: GraphModule, _: Any, measured: Any = measured) -> None:
            specs = [s for region in find_regions(gm.graph, "gather") for s in region.tag.specs]
            measured.append((profile(gm.graph).peak, sum(s.full_bytes() for s in specs)))

        with (
            planned(memory_budget=budget, bucket_bytes=0),
            compiled_fsdp.pipeline(measure, before="verify", without="flatten_peak"),
        ):
            run, step = whole(options, 2, OPTIMIZERS["adamw"])
            losses = [step(batches(options, 2, i)).item() for i in range(STEPS)]
        check_equal(losses, wanted, f"losses, budget {budget}")
        check_equal(run.state(), loop.state(), f"state, budget {budget}")
        found += measured
    return found


def test_budget(two: Pool) -> None:
    """A budget keeps as many parameters as fit beside the activations of one micro-batch."""
    dropped, kept, half = two.run(budgeted, timeout=SLOW)[0]
    assert kept[1] < dropped[1]
    least, room = dropped[0], kept[0] - dropped[0]
    assert room > 0
    assert least < half[0] <= least + 0.5 * room
    assert kept[1] < half[1] < dropped[1]


def refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def made(loss: Any = None, **more: Any) -> Any:
        mean = loss or (lambda model, x: model(x).square().mean())
        return compile_step(model, optimizer, mean, backend="compiled_fsdp_eager", **more)

    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match=r"accumulate=.*; should be a number of micro-batches"):
            made(accumulate=wrong)
    with pytest.raises(ValueError, match="reduce_once=1; should be True or False"):
        made(accumulate=2, reduce_once=1)
    step, x = made(accumulate=2), torch.randn(3, 6)
    with pytest.raises(TypeError, match=r"it takes one list, of 2 batches: step\(\[batch_0"):
        step(x, x)
    with pytest.raises(ValueError, match="accumulate=2, and 3 batches were given"):
        step([x, x, x])
    with pytest.raises(TypeError, match="a micro-batch is a float; should be a tuple"):
        step([x, 1.0])
    first = step([x, (x,)])  # one tensor, and arguments by place
    assert step([[x], {"x": x}]) < first
    one_of_two = made(lambda model, x, trains=True: model(x).mean() if trains else x.mean())
    with pytest.raises(RuntimeError, match="depends on no parameter"):
        one_of_two(x, trains=False)
    count = torch.zeros(4)

    def counted(model: Any, x: Any) -> Any:
        count.add_(1)
        return (model(x) * count).square().mean()

    with pytest.raises(NotImplementedError, match="accumulate=2, and forward writes in place"):
        made(counted, accumulate=2)([x, x])
    assert made(counted)(x) > 0
    step = made(lambda m, x, trains=True: m(x).mean() if trains else x.mean(), accumulate=2)
    with pytest.raises(NotImplementedError, match="should be one for each micro-batch, the loss"):
        step([x, (x, False)])


def test_refused(two: Pool) -> None:
    two.run(refused, timeout=SLOW)
