"""Predicts what a graph will cost and need, and decides what to do about it; changes no graph."""
