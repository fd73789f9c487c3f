"""The first line of a report: how much of a step waits, for what most, and what to look at next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_fsdp.dump.layout import MeasuredStep

LITTLE = 0.01  # share of a step that is not worth the reader's time
UNMEASURED = (
    "Predicted, not measured. Lay a profiled step over it (add_profile, or report --profile) to "
    "see what really waits."
)


def headline(step: MeasuredStep | None) -> str:
    """One sentence or two on the profiled step of a rank; None: nobody has profiled one."""
    if step is None:
        return UNMEASURED
    total = step["total"]
    shares = {name: step[name] / total if total else 0.0 for name in ("waiting", "starting")}
    if step["compiling"]:
        return (
            f"{percent(step['compiling'] / total)} of the profiled step is compilation, so it says "
            "little of others: profile a later step."
        )
    if shares["waiting"] < LITTLE:
        text = "Less than 1 % of the step waits for communication: there is nothing to gain."
    else:
        name, seconds = step["largest"] or ("", 0.0)
        what = name if name.startswith("a ") else f"the {name}"
        text = (
            f"{percent(shares['waiting'])} of the step waits for communication "
            f"({shown(step['waiting'])} of {shown(total)}); largest: {what}, {shown(seconds)}."
        )
    if shares["starting"] > max(shares["waiting"], LITTLE):
        text += (
            f" Starting collectives takes more, {percent(shares['starting'])} "
            f"({shown(step['starting'])}): the training thread copies, or shares its core with "
            "those that send."
        )
    return text


def percent(share: float) -> str:
    """A share of a hundred."""
    return f"{100 * share:.0f} %"


def shown(seconds: float) -> str:
    """A time with a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.1f} ms"
    return f"{1e6 * seconds:.0f} µs"
