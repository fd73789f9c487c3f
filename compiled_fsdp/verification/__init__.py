"""The meaning of a finished graph, and the error for one that breaks a rule."""
