"""For whole programs: the command line, and torch's names replaced by ours."""
