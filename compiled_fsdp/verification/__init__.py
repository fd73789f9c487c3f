"""What must hold of a finished graph."""
