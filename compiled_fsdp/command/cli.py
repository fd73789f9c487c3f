"""`python -m compiled_fsdp dump|diff|explain|report|verify`: look at a folder that
`COMPILED_FSDP_DUMP` or `dumped_to` wrote.

`python -m compiled_fsdp run SCRIPT ...` runs a script written for torch's FSDP with ours;
`simulate SCRIPT ...` a training script as one rank of many, on wires of known speed.

Exit status: 0; 1 where `diff` finds a difference or `verify` something wrong; 2 for a folder that
cannot be read. What comes from the folder is printed with its control characters shown, not sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.inspection.check import DumpError
from compiled_fsdp.inspection.dump_checks import difference, totals, violations
from compiled_fsdp.inspection.dump_folder import Dumped, DumpedGraph, DumpedRank, read_folder
from compiled_fsdp.inspection.explanation import Explanation
from compiled_fsdp.inspection.report.measured import add_profile
from compiled_fsdp.inspection.report.page import write_report
from compiled_fsdp.inspection.report.trace import write_trace
from compiled_fsdp.ir.printer import printable
from compiled_fsdp.version import __version__

from .replacement import replace_stock
from .script import is_there, run_script, say
from .simulation import add_simulate, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    if run in (_run, simulate):
        return run(options)  # what the script raises is the script's
    try:
        return run(options)
    except DumpError as error:
        sys.stderr.write(f"python -m compiled_fsdp {options.command}: {printable(str(error))}\n")
        return 2
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m compiled_fsdp",
        description="Look at what COMPILED_FSDP_DUMP wrote, or run a script with our FSDP.",
    )
    parser.add_argument("--version", action="version", version=f"compiled_fsdp {__version__}")
    # What several commands take: a folder, or a script.
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("folder", type=Path, metavar="DIR")
    one.add_argument("--rank", type=int, help="of this rank alone")
    script = argparse.ArgumentParser(add_help=False)
    script.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module"
    )
    script.add_argument("script", metavar="SCRIPT")
    script.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")
    # In the order in which the help lists them.
    commands = parser.add_subparsers(dest="command", required=True)
    _add_dump(commands, one)
    _add_diff(commands)
    _add_explain(commands, one)
    _add_report(commands)
    _add_verify(commands, one)
    _add_run(commands, script)
    add_simulate(commands, script)
    return parser


def _ranks(options: argparse.Namespace) -> list[DumpedRank]:
    ranks = read_folder(options.folder)
    return ranks if options.rank is None else [_of_number(ranks, options.rank, options.folder)]


def _of_number(ranks: list[DumpedRank], number: int, folder: Path) -> DumpedRank:
    found = [rank for rank in ranks if rank.rank == number]
    if not found:
        raise DumpError(f"{folder} has no rank {number}; it has {[rank.rank for rank in ranks]}")
    return found[0]


def _graphs(rank: DumpedRank, name: str | None) -> list[DumpedGraph]:
    """Those of this name or kind."""
    found = [graph for graph in rank.graphs if name is None or name in (graph.name, graph.kind)]
    if not found:
        raise DumpError(
            f"{rank.path} has no graph {name!r}; it has {[graph.name for graph in rank.graphs]}"
        )
    return found


# -- dump


def _add_dump(commands: Any, one: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "dump", parents=[one], help="list the graphs, or print them after a pass"
    )
    parser.add_argument("--graph", help="of these alone: 001_forward, forward, backward or joint")
    parser.add_argument(
        "--after",
        metavar="PASS",
        help="print the graphs after this pass: capture, lower, ..., last",
    )
    parser.set_defaults(run=_dump)


def _dump(options: argparse.Namespace) -> int:
    for rank in _ranks(options):
        if options.after is None and options.graph is None:
            say(f"rank {rank.rank}: {_head(rank)}")
        for graph in _graphs(rank, options.graph):
            if options.after is None:
                say(f"  {graph.path}")
                for entry in graph.passes:
                    say(f"    {entry.path.name:<27} {entry.provenance.split('; ', 2)[-1]}")
            else:
                entry = graph.after(None if options.after == "last" else options.after)
                say(f"# {entry.where}\n{entry.text}")
    return 0


def _head(rank: DumpedRank) -> str:
    settings = rank.settings
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    return f"of {settings['world_size']}, {settings['backend']}; {versions}"


# -- diff


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff", help="compare two passes, two ranks, or two runs: collectives, casts, frees, peak"
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "other", type=Path, metavar="DIR2", nargs="?", help="the dump of another run"
    )
    parser.add_argument(
        "--passes",
        nargs=2,
        metavar="PASS",
        help="compare each graph after the one and after the other",
    )
    parser.add_argument(
        "--ranks", nargs=2, type=int, metavar="RANK", help="compare these, graph by graph"
    )
    parser.add_argument(
        "--after",
        metavar="PASS",
        help="which pass ranks or runs are compared after; the last, unless given",
    )
    parser.add_argument("--graph", help="these alone: 001_forward, forward, backward or joint")
    parser.set_defaults(run=_diff)


def _diff(options: argparse.Namespace) -> int:
    found = [text for one, two in _pairs(options) if (text := difference(one, two))]
    say("\n\n".join(found) if found else "no difference")
    return 1 if found else 0


def _pairs(options: argparse.Namespace) -> Iterator[tuple[Dumped, Dumped]]:
    """Yields what is compared with what."""
    mine = read_folder(options.folder)
    asked = [options.other is not None, options.ranks is not None, options.passes is not None]
    if sum(asked) != 1:
        raise DumpError("give one of: a second folder, --passes PASS PASS, --ranks RANK RANK")
    if options.passes is not None:
        for graph in (g for rank in mine for g in _graphs(rank, options.graph)):
            names = [entry.name for entry in graph.passes]
            if options.graph is not None or all(name in names for name in options.passes):
                one, two = options.passes
                yield graph.after(one), graph.after(two)
        return
    if options.ranks is not None:
        one, two = (_of_number(mine, number, options.folder) for number in options.ranks)
        yield from _alike(one, two, options)
        return
    theirs = read_folder(options.other)
    for rank in mine:
        yield from _alike(rank, _of_number(theirs, rank.rank, options.other), options)


def _alike(
    one: DumpedRank, two: DumpedRank, options: argparse.Namespace
) -> Iterator[tuple[Dumped, Dumped]]:
    """The graphs of two ranks or runs, in order of compilation."""
    mine, theirs = _graphs(one, options.graph), _graphs(two, options.graph)
    kinds = [[graph.kind for graph in graphs] for graphs in (mine, theirs)]
    if kinds[0] != kinds[1]:
        raise DumpError(
            f"{one.path} has the graphs {kinds[0]}, {two.path} {kinds[1]}: choose some with --graph"
        )
    for a, b in zip(mine, theirs, strict=True):
        if options.after is None or all(
            any(options.after == e.name for e in g.passes) for g in (a, b)
        ):
            yield a.after(options.after), b.after(options.after)


# -- run


def _add_run(commands: Any, script: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "run",
        parents=[script],
        help="run a script that imports torch's FSDP with ours in its place",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """As `python SCRIPT ...` would, once torch's names are ours; under torchrun, `torchrun ... -m
    compiled_fsdp run SCRIPT ...`.
    """
    if not is_there(options.script, is_module=options.is_module, command="run"):
        return 2
    replace_stock()
    run_script(options.script, options.arguments, is_module=options.is_module)
    return 0


# -- explain, report, verify


def _add_explain(commands: Any, one: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "explain", parents=[one], help="say what was known of the model after its first step"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    for rank in _ranks(options):
        path, values = rank.explanation_path, rank.explanation
        if values is None:
            say(
                f"rank {rank.rank}: no optimizer had stepped when the run ended, so {path} was not "
                "written. Its graphs:"
            )
            for graph in (g for g in rank.graphs if g.is_half):
                counts = (f"{name} {number}" for name, number in totals(graph.after(None).gm))
                say(f"  {graph.name}: {', '.join(counts)}")
            continue
        try:
            found = Explanation.of_dict(values)
            text = (
                json.dumps(values, indent=1)
                if options.json
                else f"rank {rank.rank}, after its first step\n{found}"
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DumpError(f"{path} is damaged, or of another version: {error}") from error
        say(text)
    return 0


def _add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="write one HTML page")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="default: report.html"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="lay this Chrome trace of a step over the predicted one",
    )
    parser.add_argument(
        "--of-rank", type=int, default=0, metavar="RANK", help="whose profile it is; default: 0"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write the timelines for https://ui.perfetto.dev",
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    if options.profile is not None:
        add_profile(options.folder, options.profile, options.of_rank)
    write_report(options.folder, options.out)
    if options.trace is not None:
        write_trace(options.folder, options.trace)
    say(f"{options.out} written")
    return 0


def _add_verify(commands: Any, one: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "verify",
        parents=[one],
        help="check every invariant again, after every pass, and across ranks",
    )
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    ranks = _ranks(options)
    found = list(violations(ranks))
    for text in found:
        say(text)
    graphs = sum(graph.is_half for rank in ranks for graph in rank.graphs)
    say(f"{graphs} graphs of {len(ranks)} ranks: {len(found) or 'nothing'} wrong")
    return 1 if found else 0
