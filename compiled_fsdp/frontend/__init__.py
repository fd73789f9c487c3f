"""Both front ends share this: states and hooks of sharded modules, checks, fallback, whole-model
functions.
"""
