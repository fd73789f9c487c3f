"""Which line a warning names, and switches in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import compiled_fsdp
from compiled_fsdp.errors import is_users
from compiled_fsdp.options import is_verifying

TORCH, OURS = Path(torch.__file__).parent, Path(compiled_fsdp.__file__).parent


@pytest.mark.parametrize("folder", [TORCH, OURS, OURS.parent / "passes"])
def test_whose_code_it_is(folder: Path) -> None:
    """A library whose name begins like torch's is not torch: torchtitan, torchvision."""
    assert not is_users(str(folder / "nn" / "modules.py"))
    assert is_users(str(folder.with_name(f"{folder.name}titan") / "train.py"))
    assert is_users(str(Path.cwd() / "train.py"))


@pytest.mark.parametrize(("value", "is_on"), [("", False), ("0", False), ("1", True)])
def test_verifying(monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool) -> None:
    monkeypatch.setenv("COMPILED_FSDP_VERIFY", value)
    assert is_verifying() is is_on
