"""Units without a graph: gathered before they compute, freed after, reduced in backward."""
