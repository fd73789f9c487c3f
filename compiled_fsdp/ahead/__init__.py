"""Compiled ahead: a folder that one process writes,
and from which every rank runs its first step.
"""
