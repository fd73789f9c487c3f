"""Where a unit ran, in the words of `explain`."""

GRAPH, EAGER, BOTH, UNLOWERED = (
    "in a graph",
    "eager",
    "in a graph and eager",
    "in a graph, not lowered",
)
NEVER, NOT_YET, EMPTY = "never gathered", "not run yet", "without parameters"
ORDER = (GRAPH, BOTH, UNLOWERED, EAGER, NEVER, NOT_YET, EMPTY)
