"""Make the sibling folder `passes/` importable as `compiled_fsdp.passes` in a source checkout.

In a wheel the package `compiled_fsdp/passes/` takes precedence over this module, which is then
inert.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent / "passes")]
