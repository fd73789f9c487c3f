"""What a graph of ours consists of: parameter specs, ops, the arithmetic around a collective, node
metadata, the printer.
"""
