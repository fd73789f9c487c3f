"""A statement, and the text in which statements are written down (`statements.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Statement:
    """Lines of source, and what they need."""

    lines: tuple[str, ...] = ()
    init: tuple[str, ...] = ()
    at: str = "forward"
    breaks: bool = False
    for_block: bool = False
    needs: tuple[str, ...] = ()


def parse(text: str) -> dict[str, Statement]:
    """Statements by name."""
    found: dict[str, Statement] = {}
    name = ""
    for line in text.strip().splitlines():
        if line.startswith("-- "):
            name, *flags = line.split()[1:]
            said = dict(flag.split("=") for flag in flags if "=" in flag)
            found[name] = Statement(
                (),
                (),
                said.get("at", "forward"),
                "breaks" in flags,
                "for_block" in flags,
                tuple(filter(None, said.get("needs", "").split(","))),
            )
        elif line.startswith("init: "):
            found[name] = replace(
                found[name], init=(*found[name].init, line.removeprefix("init: "))
            )
        else:
            found[name] = replace(found[name], lines=(*found[name].lines, line))
    return found
