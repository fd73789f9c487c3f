"""What a rule about graphs yields, and the error for a graph that breaks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.printer import around

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    Violations = Iterator[tuple[Node, str]]  # where a rule is broken, and how


class GraphInvariantError(RuntimeError):
    """A pass, or a graph written by hand, broke a rule that the rest of the compiler relies on."""

    def __init__(self, where: str, invariant: str, detail: str, node: Node | None = None) -> None:
        place = f"\n{around(node)}" if node is not None else ""
        super().__init__(
            f"after {where}: {detail}.\nInvariant: {invariant}\n"
            f"This is a bug in the pass named above, or in a pass added to the pipeline.{place}"
        )
        self.where, self.invariant, self.node = where, invariant, node
