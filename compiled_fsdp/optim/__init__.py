"""Optimizers that need whole matrices of a sharded model, each at one rank: Muon, and a hook for
others.
"""
