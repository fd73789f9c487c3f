"""What is said of parameters that an optimizer steps and no unit trains (`frontend/stepped.py`)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from compiled_fsdp import compile_step, fully_shard, fully_sharded_data_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.pool import Pool

UNITS = {
    "no root": ("body", ""),
    "compiled, no root": ("body", ""),
    "a root": ("body", "root"),
    "ignored by the root": ("body", "ignoring"),
    "FSDP1, no root": ("wrapped", ""),
    "FSDP1, compiled, no root": ("wrapped", ""),
    "FSDP1, a root": ("wrapped", "root"),
    "FSDP1, ignored by the root": ("wrapped", "ignoring"),
    "FSDP1, a second model called later": ("wrapped", "root"),
    "beside DDP": ("body", ""),
    "a whole step, no root": ("body", ""),
    "a whole step, ignored by the root": ("body", "ignoring"),
    "FSDP1, a whole step, no root": ("wrapped", ""),
    "FSDP1, a whole step, ignored by the root": ("wrapped", "ignoring"),
}


def wrapped(module: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> nn.Module:
    """FSDP1's."""
    wrapper = fully_sharded_data_parallel.FullyShardedDataParallel
    options = {"ignored_states": [*ignored]} if ignored else {}
    return wrapper(module, use_orig_params=True, device_id=torch.device("cpu"), **options)


def said(name: str) -> list[str]:
    """What two steps of a model tell that has these units."""
    inner, outer = UNITS[name]
    torch._dynamo.reset()
    model = nn.Sequential()
    body, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
    if inner == "wrapped":
        body = wrapped(body)
    else:
        fully_shard(body)
    model.add_module("body", body)
    model.add_module("head", DDP(head) if "DDP" in name else head)
    if outer:
        ignored = {*head.parameters()} if outer == "ignoring" else set()
        if inner == "wrapped":
            model = wrapped(model, ignored)
        else:
            fully_shard(model, ignored_params=ignored)
    second = wrapped(nn.Linear(4, 2)) if "second" in name else model
    params = dict.fromkeys([*model.parameters(), *second.parameters()])
    optimizer = torch.optim.SGD(params, lr=0.1)
    call = torch.compile(model, backend="compiled_fsdp_eager") if "compiled" in name else model
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if "whole step" in name:
            step = compile_step(
                model, optimizer, lambda m, x: m(x).sum(), backend="compiled_fsdp_eager"
            )
            for _ in range(2):
                step(torch.ones(2, 4))
        for _ in range(2 * ("whole step" not in name)):
            call(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            call = second if "second" in name else call
    return [str(each.message) for each in found if "beside sharded" in str(each.message)]


@pytest.mark.parametrize("name", UNITS)
def test_who_reduces_them(two: Pool, name: str) -> None:
    """Once, and only where nobody does: ranks part, each by its own gradient."""
    for texts in two.run(said, name)[:1]:
        assert len(texts) == ("no root" in name), texts
        assert all("head.0" not in text and "(2, 4), (2,)" in text for text in texts), texts
