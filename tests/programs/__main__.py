"""Random programs from the command line.

python tests/programs --count 1000          # prints faults, shrunk, and a table
python tests/programs --singles             # each statement by itself
python tests/programs --seed 17 --show      # one program, every kind, without shrinking
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs.source import Script

os.environ.setdefault("COMPILED_FSDP_VERIFY", "1")
ROOT = Path(__file__).parents[2]
GIVEN = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
sys.path[:0] = [*GIVEN, str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]


def main() -> None:
    from pool import Pool
    from programs.draw import make
    from programs.hunt import Hunter
    from programs.program import Program
    from programs.singles import singles
    from programs.source import read, script

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--singles", action="store_true")
    parser.add_argument("--only", default="", help="programs that say one of these statements, by comma")
    parser.add_argument("--skip", default="", help="but none of these")
    parser.add_argument("--file", default="", help="run a script that --found wrote")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--found", default="", help="a folder for the scripts of faults")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    programs = list(singles()) if options.singles else [make(s) for s in range(options.seed, options.seed + options.count)]
    if only:
        programs = [p for p in programs if only & (p.names() | {p.way, p.optimizer})]
    skip = set(filter(None, options.skip.split(",")))
    programs = [p for p in programs if not skip & (p.names() | {p.way, p.optimizer})]
    scripts: list[Program | Script] = [read(Path(options.file).read_text())] if options.file else [*programs]
    pools = {2: Pool(2), 4: Pool(4)}
    hunter = Hunter(pools)
    words: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    for i, entry in enumerate(scripts):
        program = entry if isinstance(entry, Program) else None
        this = script(entry) if isinstance(entry, Program) else entry
        result = hunter.check(this)
        if result.invalid:
            words["unsharded", "invalid"] += 1
            print(f"=== {i} INVALID {result.invalid[:300]}\n{this.source}", flush=True)
            continue
        words.update((v.kind, v.word + (" exactly" if v.is_exact else "")) for v in result.verdicts)
        if options.show or options.file:
            print(f"=== {i} of seed {program.seed if program else ''}\n{this.header()}{this.source}", end="")
            print(
                *(f"{v.kind}: {v.word} {v.detail}" for v in result.verdicts), f"stock: {result.stock}", sep="\n", flush=True
            )
        for fault in result.faults:
            this, verdict = this, fault
            if program and not (options.singles or options.no_shrink):
                small, verdict = hunter.shrink(program, fault.kind)
                this = script(small)
                names = small.names()
            else:
                names = program.names() if program else set()
            this = replace(this, kinds=(fault.kind,))
            comment = [f"{fault.kind}: {verdict.detail}", f"stock: {result.stock}"]
            text = (
                this.header() + "".join(f"# {line[:160]}\n" for c in comment for line in c.splitlines()[:12]) + this.source
            )
            print(f"=== {i} FAULT of seed {program.seed if program else ''}\n{text}", flush=True)
            if options.found:
                name = "+".join(sorted(names - {"call", "read"}))[:60]
                (Path(options.found) / f"{fault.kind}_{name}_{program.way if program else ''}_{i}.py").write_text(text)
    for (kind, word), number in sorted(words.items()):
        print(f"{kind:12}{word:18}{number:6}")
    print(f"{len(scripts)} programs in {time.monotonic() - began:.0f} s")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
