"""What both front ends share: states and hooks of sharded modules, checks, fallback, whole-model
functions.
"""
