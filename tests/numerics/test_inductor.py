"""The default backend: the same numbers within rounding, our passes in its graphs, a user's own hook beside them.

Inductor fuses operations, and a fused kernel keeps intermediate values in registers and contracts multiply-adds; so results differ
in the last bits. With SGD these stay that small (AdamW would turn a zero gradient's rounding into a whole step).
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch._inductor.config as inductor_config
from harness import Options, batch_of, check_parity, make
from models import loss_of
from pool import Pool
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

from compiled_fsdp import fully_shard, inductor
from compiled_fsdp.collectives import STARTS
from compiled_fsdp.schema import REDUCE_GRAD, UNSHARD

ROUNDING = (1e-4, 1e-5)
SLOW = 400.0  # seconds: a C++ compiler runs


def test_gpt(two: Pool) -> None:
    options = Options("gpt", steps=3, optimizer="sgd")
    two.run(check_parity, options, ("stock", "unsharded"), ("inductor",), *ROUNDING, timeout=SLOW)


def test_odd_sizes_in_bf16(two: Pool) -> None:
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options("odd", steps=3, optimizer="sgd", policies=(policy,))
    # Inductor keeps fused bf16 chains in fp32, stock rounds each to 8 bits: relative 2^-8 per rounding, a few deep.
    two.run(check_parity, options, ("stock",), ("inductor",), 0.03, 3e-3, timeout=SLOW)


def test_what_a_gather_reads_lives_until_it_is_awaited(two: Pool) -> None:
    two.run(input_is_kept, timeout=SLOW)


def input_is_kept() -> None:
    """No gradient for the input: backward leaves the first norm out, so what it gathers is copied together into a temporary."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))

    model = nn.Sequential(block(), block())
    for unit in (model[0], model[1], model):
        fully_shard(unit, reshard_after_forward=True)
    call = torch.compile(model, fullgraph=True)
    _, codes = run_and_get_code(lambda: call(torch.randn(4, 8)).square().mean().backward())
    num_temporaries = 0
    for lines in (code.splitlines() for code in codes):
        for start, line in enumerate(lines):
            gather = re.search(r"(\w+) = torch.ops.fsdp.all_gather.default\((buf\w+),", line)
            if gather is None:
                continue
            num_temporaries += 1
            names = [gather[1], *re.findall(rf"(\w+) = {gather[1]}\b", "\n".join(lines))]
            end = next(i for i, text in enumerate(lines) if any(f"wait_tensor.default({name})" in text for name in names))
            early = [text for text in lines[start + 1 : end] if re.search(rf"\b{gather[2]}\b", text)]
            assert not early, f"{gather[2]} is given away before {gather[1]} is awaited: {early}"
    assert num_temporaries > 0


def test_users_hook_runs_too(two: Pool) -> None:
    two.run(with_users_hook, timeout=SLOW)


class Recorder(CustomGraphPass):
    """A user's pass, set before `fully_shard`."""

    def __init__(self) -> None:
        self.seen: list[set[Any]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append({n.target for n in graph.nodes})

    def uuid(self) -> None:
        return None


def with_users_hook() -> None:
    before, after = Recorder(), Recorder()
    original = inductor.run_half

    def run_half(gm: Any, **options: Any) -> Any:
        result = original(gm, **options)
        after(result.graph)
        return result

    with inductor_config.patch(post_grad_custom_post_pass=before, joint_custom_post_pass=None):
        inductor.run_half = run_half
        try:
            _, call, _ = make("inductor", Options("one_unit"))
            loss_of(call(*batch_of("one_unit", 0))).backward()
        finally:
            inductor.run_half = original
    for recorder, has_ours, has_collectives in ((before, True, False), (after, False, True)):
        assert len(recorder.seen) == 2, "forward and backward"
        for targets in recorder.seen:
            assert bool(targets & {UNSHARD, REDUCE_GRAD}) == has_ours
            assert bool(targets & set(STARTS)) == has_collectives


def test_buffers_under_way_are_not_reused(two: Pool) -> None:
    two.run(without_reuse, timeout=SLOW)


def without_reuse() -> None:
    """In mixed precision the cast that is gathered is a buffer of the graph's: nothing may be written to it while it is sent."""
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def train() -> None:
        _, call, _ = make("inductor", Options("equal_units", policies=(policy,)))
        loss_of(call(*batch_of("equal_units", 0))).backward()

    _, codes = run_and_get_code(train)
    code = "\n".join(codes)
    sent = re.findall(r"torch\.ops\.fsdp\.all_gather\.default\((buf\d+), ", code)
    assert len(sent) >= 4, "the units cast before they gather"
    reused = [name for name in sent if re.search(rf"\bdel {name}  # reuse", code)]
    assert not reused, f"{reused} are written to while they are sent"
