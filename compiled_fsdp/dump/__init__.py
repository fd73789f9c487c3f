"""Dumps: what is written while a model compiles."""
