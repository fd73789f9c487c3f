"""A dump as one HTML page or as a trace for Perfetto; see `inspection/report`."""

from compiled_fsdp.inspection.report import DumpError as DumpError
from compiled_fsdp.inspection.report import add_profile as add_profile
from compiled_fsdp.inspection.report import write_report as write_report
from compiled_fsdp.inspection.report import write_trace as write_trace

__all__ = ["DumpError", "add_profile", "write_report", "write_trace"]
