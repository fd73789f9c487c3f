"""Random programs from the command line.

python tests/programs --count 1000 --jobs 6 --out results.jsonl  # a table; a line of JSON for each
python tests/programs --count 1000 --jobs 6 --seconds 540        # as many as fit; it says how many
python tests/programs --routed --count 100                       # with a routed layer in each
python tests/programs --step --count 100                         # that train by compile_step
python tests/programs --alone --count 100                        # whose graph breaks on one rank
python tests/programs --scripts --count 100                      # adapters, adversaries, files, ...
python tests/programs --singles                                  # each statement by itself
python tests/programs --seed 17 --count 1 --show                 # one program, every kind
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from programs.hunt import Hunter, Result
    from programs.program import Program
    from programs.results import Line
    from programs.source import Script

os.environ.setdefault("COMPILED_FSDP_VERIFY", "1")
os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # or each rank of each job has as many processes as there are cores
ROOT = Path(__file__).parents[2]
GIVEN = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
sys.path[:0] = [*GIVEN, str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes, each with two and four ranks; 1 for every 3 cores",
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no program begins later"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="seconds for a kind of a program, Inductor four times as many",
    )
    parser.add_argument(
        "--out", default="", help="a file for the results, a line of JSON for each program"
    )
    parser.add_argument("--singles", action="store_true", help="each statement by itself")
    parser.add_argument(
        "--routed", action="store_true", help="programs that send rows to other ranks' layers"
    )
    parser.add_argument("--step", action="store_true", help="programs that train by compile_step")
    parser.add_argument(
        "--alone", action="store_true", help="programs whose graph is broken on one rank alone"
    )
    parser.add_argument(
        "--scripts", action="store_true", help="programs with what whole scripts are made of"
    )
    parser.add_argument(
        "--only", default="", help="programs that say one of these statements, by comma"
    )
    parser.add_argument("--skip", default="", help="but none of these")
    parser.add_argument(
        "--without", default="", help="kinds that are not run, by comma: inductor takes the longest"
    )
    parser.add_argument("--plant", default="", help="a fault of planted.py, in every program")
    parser.add_argument(
        "--find-plants",
        default="",
        help="faults of planted.py, by comma: the first program that finds each",
    )
    parser.add_argument("--file", default="", help="run a script that --found wrote")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--found", default="", help="a folder for the scripts of faults")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help=argparse.SUPPRESS
    )  # of a job: when time is up
    parser.add_argument(
        "--job", default="", help=argparse.SUPPRESS
    )  # the folder in which jobs claim seeds
    return parser.parse_args(arguments)


def main() -> None:
    arguments = sys.argv[1:]
    options = parse(arguments)
    began = time.time()
    until = min(options.until, began + options.seconds)
    if options.find_plants:
        _find_plants(options, until)
        return
    if options.jobs > 1 and not options.job:
        from programs.jobs import run_jobs

        with tempfile.TemporaryDirectory() as folder:
            lines = run_jobs([*arguments, "--until", str(until)], options.jobs, until, folder)
    else:
        lines = list(_run(options, until))
    if not options.job:
        _report(options, lines, time.time() - began)


def _report(options: argparse.Namespace, lines: list[Line], seconds: float) -> None:
    from programs.results import table, write

    if options.out:
        write(options.out, lines)
    print(table(lines))
    faulty = sorted(
        line["seed"]
        for line in lines
        if any(v["word"] == "fault" for v in line["verdicts"].values())
    )
    print(f"{len(lines)} programs in {seconds:.0f} s; faults in {len(faulty)}: {faulty}")
    missing = sorted(
        {*range(options.seed, options.seed + options.count)} - {line["seed"] for line in lines}
    )
    if missing and not (options.only or options.skip or options.singles or options.file):
        print(f"not run, or not to the end: {len(missing)}, seeds {missing[:8]} to {missing[-1]}")


def _run(options: argparse.Namespace, until: float) -> Iterator[Line]:
    """Programs one by one, each written when it is done."""
    from kit.pool import Pool
    from programs.hunt import Hunter
    from programs.results import line_of
    from programs.source import read

    pools = {2: Pool(2), 4: Pool(4)}
    hunter = Hunter(pools, options.plant, options.limit)
    try:
        with open(options.out or os.devnull, "w") as out:
            if options.file:
                this = read(Path(options.file).read_text())
                _show(this, hunter.check(this))
            for program in () if options.file else _programs(options):
                if time.time() > until:
                    break
                began = time.monotonic()
                result = hunter.check(_script(program))
                line = line_of(program, result, time.monotonic() - began)
                _keep(line, out)
                if options.show:
                    _show(_script(program), result)
                is_shrunk = not (options.singles or options.no_shrink or time.time() > until)
                _tell(hunter, program, result, options.found, is_shrunk=is_shrunk)
                yield line
    finally:
        for pool in pools.values():
            pool.close()


def _find_plants(options: argparse.Namespace, until: float) -> None:
    """Count up over the programs on two ranks that say what a plant breaks; each must be clean
    without it.
    """
    from kit.pool import Pool
    from programs.draw import make
    from programs.hunt import Hunter
    from programs.planted import can_show

    pools = {2: Pool(2)}
    clean, planted = Hunter(pools, "", options.limit), Hunter(pools, "", options.limit)
    for name in options.find_plants.split(","):
        planted.plant, tried = name, 0
        for program in map(make, range(options.seed, options.seed + options.count)):
            if program.world != 2 or not can_show(program, name) or time.time() > until:
                continue
            tried += 1
            this = _script(replace(program, kinds=("eager", "compiled")))
            fault = next(
                (f for f in planted.check(this).faults if not f.detail.startswith("hangs")), None
            )
            if fault is not None and not clean.check(this).faults:
                print(
                    f"{name}: seed {program.seed}, program {tried} of these: {fault.kind} "
                    f"{fault.detail[:120]}",
                    flush=True,
                )
                break
        else:
            print(f"{name}: not in {tried} programs", flush=True)
    pools[2].close()


def _programs(options: argparse.Namespace) -> Iterator[Program]:
    from programs.draw import make, make_alone, make_routed, make_script, make_step
    from programs.jobs import claimed
    from programs.singles import singles

    only, skip = ({*filter(None, text.split(","))} for text in (options.only, options.skip))
    listed = [replace(p, seed=i) for i, p in enumerate(singles())] if options.singles else []
    seeds = range(len(listed)) if listed else range(options.seed, options.seed + options.count)
    apart = {"routed": make_routed, "step": make_step, "alone": make_alone}
    apart["scripts"] = make_script
    made = next((fn for name, fn in apart.items() if getattr(options, name)), make)
    for seed in claimed(seeds, options.job):
        program = listed[seed] if listed else made(seed)
        said = program.names() | {program.way, program.optimizer}
        if (not only or only & said) and not skip & said:
            without = options.without.split(",")
            yield replace(program, kinds=tuple(k for k in program.kinds if k not in without))


def _script(program: Program) -> Script:
    from programs.source import script

    return script(program)


def _keep(line: Line, out: TextIO) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _show(this: Script, result: Result) -> None:
    verdicts = "".join(f"{v.kind}: {v.word} {v.detail}\n" for v in result.verdicts)
    print(
        f"{this.header()}{this.source}{result.invalid}{verdicts}stock: {result.stock}\nsaid: "
        f"{result.said}\n",
        end="",
        flush=True,
    )


def _tell(hunter: Hunter, program: Program, result: Result, found: str, *, is_shrunk: bool) -> None:
    """Print what is wrong with a program, each fault with the smallest script."""
    if result.invalid:
        print(
            f"=== seed {program.seed} INVALID {result.invalid[:300]}\n{_script(program).source}",
            end="",
            flush=True,
        )
    for fault in result.faults:
        small, verdict = hunter.shrink(program, fault.kind) if is_shrunk else (program, fault)
        this = replace(_script(small), kinds=(fault.kind,))
        comment = [f"{fault.kind}: {verdict.detail}", f"stock: {result.stock}"]
        said = "".join(f"# {line[:160]}\n" for text in comment for line in text.splitlines()[:12])
        text = this.header() + said + this.source
        print(f"=== seed {program.seed} FAULT\n{text}", end="", flush=True)
        if found:
            name = "+".join(sorted(small.names() - {"call", "read"}))[:60]
            (Path(found) / f"{fault.kind}_{name}_{program.way}_{program.seed}.py").write_text(text)


if __name__ == "__main__":
    main()
