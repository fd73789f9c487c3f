"""Which Python `make` takes: programs that say how long the loop took stand for Pythons."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "interpreter.py"


def stub(folder: Path, said: str, code: int = 0) -> Path:
    """A program of this answer in a folder of its own."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\necho {said}\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answers", "taken"),
    [
        ([("1.0", 0), ("0.9", 0)], 0),  # not worth leaving what the path says
        ([("1.0", 0), ("0.9", 0), ("0.7", 0)], 2),
        ([("0.1", 1), ("1.0", 0)], 1),  # the first has no venv, or is too old
        ([("1.0", 0), ("0.1", 1)], 0),
    ],
)
def test_the_first_unless_another_is_worth_it(
    tmp_path: Path, answers: list[tuple[str, int]], taken: int
) -> None:
    pythons = [stub(tmp_path / str(i), *answer) for i, answer in enumerate(answers)]
    assert runpy.run_path(str(SCRIPT))["chosen"](pythons) == pythons[taken]


def test_none_that_can_be_used(tmp_path: Path) -> None:
    chosen = runpy.run_path(str(SCRIPT))["chosen"]
    assert chosen([stub(tmp_path / "old", "1.0", 1)]) == Path("python3")


def test_the_path_is_searched_and_links_are_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.mkdir()
    (link / "python3").symlink_to(sys.executable)
    path = f"{tmp_path / 'nothing'}:{link}:{Path(sys.executable).parent}"
    done = subprocess.run(
        [sys.executable, SCRIPT], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(link / "python3")
