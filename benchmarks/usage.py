"""The one exception for what the user can put right; shown as one line, without a traceback."""


class UsageError(ValueError):
    """Options, files or a machine that cannot give the run asked for."""
