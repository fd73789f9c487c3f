"""Why Dynamo compiled again, in words where it was for something of ours."""

from __future__ import annotations

import re

SETTINGS = (
    "set_requires_gradient_sync, set_reshard_after_forward, set_gradient_divide_factor, a prefetch "
    "list, ..."
)
# What a guard looks at, at the end of its path, and what it means that it has changed.
OURS = {
    "is_frozen": "a parameter of {unit} was frozen, or is trained again (requires_grad)",
    "is_resident": "full parameters of {unit} stay from one use to the next now, or do not any more",
    "flat": "the parameters of {unit} lie elsewhere in memory",
    "key": "what {unit} is set to do is another than when it was compiled ({settings})",
}
GUARD = re.compile(r"(?P<path>\S.*)\.handle\.(?P<field>\w+)\b")
MODES = {
    "GLOBAL_STATE changed: grad_mode": "it was compiled with gradients and is called without, or "
    "the other way round (torch.no_grad, as in an evaluation)",
}


def in_words(reason: str) -> str:
    """A guard that failed, as one line: whose compilation it belongs to, and what has changed."""
    line = reason.strip().split("\n", 1)[0].strip()
    number, colon, guard = line.partition(": ")
    prefix = f"{number}: " if colon and re.fullmatch(r"\d+/\d+", number) else ""
    guard = guard if prefix else line
    mode = next((text for start, text in MODES.items() if guard.startswith(start)), None)
    if mode is not None:
        return prefix + mode
    found = GUARD.match(guard)
    meaning = OURS.get(found["field"]) if found else None
    if found is None or meaning is None:
        return prefix + guard
    unit = ".".join(
        re.findall(r"_modules\['([^']+)'\]", found["path"].split("_forward_pre_hooks")[0])
    )
    named = f"unit {unit!r}" if unit else "the outermost unit"
    return prefix + meaning.format(unit=named, settings=SETTINGS)
