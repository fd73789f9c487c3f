"""A dump to look at: one self-contained HTML page, or a trace for Perfetto; measured steps beside
predicted ones.

    write_report(dump_dir, out)     the page; it needs no network and no server
    write_trace(dump_dir, out)      the same timeline as a Chrome trace, for https://ui.perfetto.dev
    add_profile(dump_dir, profile)  lay a profiled step over the predicted one, in both

Data come from the folder that `dumped_to` or COMPILED_FSDP_DUMP wrote, and from nothing else. They
are JSON and text; nothing is unpickled, and every name is shown as text.
"""

from compiled_fsdp.inspection.check import DumpError as DumpError
from compiled_fsdp.inspection.report.measured import add_profile as add_profile
from compiled_fsdp.inspection.report.page import write_report as write_report
from compiled_fsdp.inspection.report.trace import write_trace as write_trace

__all__ = ["DumpError", "add_profile", "write_report", "write_trace"]
