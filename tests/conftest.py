"""Fixtures: worker pools of two and four processes, and a fake process group for what needs no
communication.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from kit.pool import (
    EVERY_PASS,
    Pool,
    compile_quickly,
    lower_as_for_a_device,
    use_scalar_kernels,
)
from kit.reported import record
from kit.variants import left_out
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import Plan, errors, progress, set_plan
from compiled_fsdp.units import unit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Else pytest listens to it too, and torch writes down every graph that it makes, for that alone.
logging.getLogger("torch.__trace").propagate = True
set_plan(Plan(bucket_bytes=0))  # or the units of small models share collectives; as in `pool.py`
use_scalar_kernels()
compile_quickly()
lower_as_for_a_device()
unit._unit_numbers = itertools.count(1 << 12)  # graphs that are written by hand have small ones
os.environ["COMPILED_FSDP_VERIFY"] = (
    "1"  # after every pass, in this process and those that it starts; see `verify_once`
)
# Else each process that imports Inductor starts another, which imports torch: 3 s of a core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# As in `use_scalar_kernels`, or they would precompile other headers.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all`, for `make test-all`."""
    parser.addoption("--all", action="store_true", help="also the tests in tests/kit/variants.py")


def pytest_configure(config: pytest.Config) -> None:
    """Say it to workers."""
    if config.getoption("--all"):
        os.environ[EVERY_PASS] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out variants, unless they are asked for, all or by name."""
    if any("::" in argument for argument in config.args):
        return
    is_whole = config.args == config.getini("testpaths")
    gone = left_out([item.nodeid for item in items], is_whole=is_whole)
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in gone])
        items[:] = [item for item in items if item.nodeid not in gone]


def pytest_collection_finish() -> None:
    """Have Python look for garbage rarely, and not among what is imported; more often than in
    `pool.py`, since nothing collects after each test.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """What another test was told once must not be missing from this one; as in `pool.py`."""
    errors._said.clear()


@pytest.fixture
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long compilations say nothing while they last, for tests of all that is said: on a slow
    machine that of two layers may take ten seconds.
    """
    monkeypatch.setattr(progress, "PERIOD", threading.TIMEOUT_MAX)


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    """Two ranks, started at first use."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four ranks, started at first use: two mesh axes, or int reshard."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def dump(two: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of two ranks for the tests of the report, with a measured step on each; to be copied
    by who changes it.
    """
    folder = tmp_path_factory.mktemp("report") / "dump"
    two.run(record, str(folder))
    return folder


@pytest.fixture
def fake_world() -> Iterator[None]:
    """This process is rank 0 of 2; collectives return at once and move nothing."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
