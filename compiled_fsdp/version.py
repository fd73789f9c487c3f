"""The version, importable without torch."""

__version__ = "0.2.0"
