"""What loops do around forward and backward: accumulate, clip, zero, evaluate; and the kinds of
optimizer.
"""

from __future__ import annotations

import pytest
import torch
from kit.harness import Options, build, check_parity, mesh_of, shard
from kit.harness import batch_of as batch
from kit.models import loss_of
from kit.pool import Pool


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "sgd+foreach",
        "adamw+foreach",
        "adamw+fused",
        "adamw+capturable",
        "adamw+amsgrad",
        "adamw+maximize",
    ],
)
def test_optimizers(two: Pool, optimizer: str) -> None:
    # capturable is refused on CPU tensors by AdamW itself, for plain tensors and DTensors alike
    if optimizer.endswith("capturable"):
        two.run(capturable_is_refused_alike)
        return
    options = Options("odd", steps=5, optimizer=optimizer)
    if not optimizer.endswith("fused"):
        two.run(check_parity, options)
        return
    # The fused kernel steps what lies beyond the last whole vector of a tensor by scalar code,
    # which rounds otherwise (up to 1.2e-7 for values near 1). So it is exact where tensors have the
    # same lengths, as ours and stock's shards have wherever they lie, but not where an element of a
    # shard is compared with the same element of the whole parameter.
    two.run(
        check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), 1e-5, 1e-6, ("stock",)
    )


def capturable_is_refused_alike() -> None:
    texts = []
    for apply in (torch.distributed.fsdp.fully_shard, __import__("compiled_fsdp").fully_shard):
        model = shard(build("odd"), Options("odd"), apply)
        loss_of(model(*batch("odd", 0))).backward()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True, foreach=False)
        with pytest.raises(AssertionError) as caught:
            optimizer.step()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("model", ["odd", "frozen", "unused"])
def test_accumulate_three_backwards(two: Pool, model: str, set_to_none: bool) -> None:
    two.run(check_parity, Options(model, steps=4, num_backwards=3, set_to_none=set_to_none))


@pytest.mark.parametrize("model", ["tied", "odd", "unused"])
def test_zero_grad_keeps_tensors(two: Pool, model: str) -> None:
    two.run(check_parity, Options(model, steps=5, set_to_none=False))


def test_clip_grad_norm(two: Pool) -> None:
    # Against stock every bit; the norm of sharded gradients is a norm of norms, so the unsharded
    # model rounds differently.
    options = Options("odd", max_norm=0.1, set_to_none=False, num_backwards=2)
    two.run(
        check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), 1e-4, 1e-6, ("stock",)
    )


@pytest.mark.parametrize("reshard", [None, True, False])
def test_evaluate_between_steps(two: Pool, reshard: bool | None) -> None:
    two.run(check_parity, Options("conv", steps=3, evaluate=True, reshard=reshard))


def test_compiled_training_and_eager_evaluation(two: Pool) -> None:
    two.run(mixed_executors)


def mixed_executors() -> None:
    from compiled_fsdp import fully_shard

    options = Options("odd")
    models = [shard(build("odd"), options, fully_shard) for _ in range(2)]
    calls = [models[0], torch.compile(models[1], backend="compiled_fsdp_eager", fullgraph=True)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in models]
    for step in range(6):
        seen = []
        for model, call, optimizer in zip(models, calls, optimizers, strict=True):
            loss = loss_of((model if step % 3 == 2 else call)(*batch("odd", step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                evaluated = loss_of(model(*batch("odd", 100 + step)))
            seen.append((loss.item(), evaluated.item()))
        assert seen[0] == seen[1], (step, seen)


def test_two_forwards_before_one_backward(two: Pool) -> None:
    two.run(two_forwards)


def two_forwards() -> None:
    from compiled_fsdp import fully_shard

    # As for a unit called twice: eager reduces once per forward; a compiled graph per forward does
    # the same.
    grads = []
    for apply, compiled in (
        (torch.distributed.fsdp.fully_shard, 0),
        (fully_shard, 0),
        (fully_shard, 1),
    ):
        model = shard(build("odd"), Options("odd"), apply)
        call = (
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            if compiled
            else model
        )
        (loss_of(call(*batch("odd", 0))) + loss_of(call(*batch("odd", 1)))).backward()
        grads.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
    for ours in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-7)


def test_retain_graph(two: Pool) -> None:
    two.run(retained)


def retained() -> None:
    from compiled_fsdp import fully_shard

    grads = []
    for apply in (torch.distributed.fsdp.fully_shard, fully_shard):
        model = shard(build("odd"), Options("odd", reshard=True), apply)
        loss = loss_of(model(*batch("odd", 0)))
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name


def test_activation_checkpointing(two: Pool) -> None:
    two.run(checkpointed)


def checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    from compiled_fsdp import fully_shard

    grads = []
    for apply, compiled in (
        (torch.distributed.fsdp.fully_shard, 0),
        (fully_shard, 0),
        (fully_shard, 1),
    ):
        model = shard(build("odd"), Options("odd", reshard=True), apply)
        for layer in model.layers:
            inner = layer.forward
            layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        call = (
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            if compiled
            else model
        )
        loss_of(call(*batch("odd", 0))).backward()
        grads.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
    for ours in grads[1:]:
        for name, grad in grads[0].items():
            assert torch.equal(ours[name], grad), name


def test_gradient_of_the_input(two: Pool) -> None:
    two.run(input_gradient)


def input_gradient() -> None:
    from compiled_fsdp import fully_shard

    seen = []
    for apply, compiled in (
        (None, 0),
        (torch.distributed.fsdp.fully_shard, 0),
        (fully_shard, 0),
        (fully_shard, 1),
    ):
        model = build("odd")
        if apply:
            shard(model, Options("odd"), apply)
        call = (
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            if compiled
            else model
        )
        x = batch("odd", 0)[0].requires_grad_()
        loss_of(call(x)).backward()
        seen.append(x.grad)
    for grad in seen[1:]:
        assert torch.equal(grad, seen[0])


def test_mesh_is_cached() -> None:
    """The meshes of the harness are made once; otherwise each case would make process groups."""
    assert mesh_of.cache_info is not None
