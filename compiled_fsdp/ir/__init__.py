"""The parts of a graph of ours: parameter specs, ops, the arithmetic around a collective, node
metadata, the printer.
"""
