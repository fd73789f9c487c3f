"""What a graph will cost and need, and what to do about it; changes no graph."""
