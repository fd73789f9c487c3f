"""Pairs of features from the command line.

python tests/pairs                            # programs in which each pair occurs, and refusals
python tests/pairs --seconds 600 --seed 3     # as many as fit
python tests/pairs --only muon,tp             # pairs with one of these
python tests/pairs --run compile_step,states  # one program
python tests/pairs --inductor                 # pairs with Inductor, half a minute each
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("COMPILED_FSDP_VERIFY", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ROOT = Path(__file__).parents[2]
GIVEN = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
sys.path[:0] = [*GIVEN, str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--size", type=int, default=0, help="features of a program")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a program")
    parser.add_argument("--only", default="", help="pairs with one of these features, by comma")
    parser.add_argument("--without", default="", help="but none of these")
    parser.add_argument("--run", default="", help="one program, by comma")
    parser.add_argument("--inductor", action="store_true", help="pairs with Inductor alone")
    parser.add_argument("--out", default="", help="a file for what was found, a JSON line each")
    parser.add_argument("--after", default="", help="such a file: go on behind it")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the programs, run none")
    return parser.parse_args()


def main() -> None:
    options = parse()
    from kit.pool import Pool
    from pairs.verdict import Judge

    pools = {2: Pool(2), 4: Pool(4)}
    try:
        if options.run:
            print(Judge(pools, options.limit)(frozenset(options.run.split(","))))
        else:
            _cover(options, Judge(pools, options.limit))
    finally:
        for pool in pools.values():
            pool.close()


def _cover(options: argparse.Namespace, judge: object) -> None:
    from pairs.cover import SIZE, Cover
    from pairs.features import SLOW, pairs
    from pairs.hunt import hunt
    from pairs.refused import REFUSED

    only, without = ({*filter(None, text.split(","))} for text in (options.only, options.without))
    only |= {*SLOW} if options.inductor else set()
    wanted = [p for p in pairs(with_slow=options.inductor) if not p & without]
    wanted = [p for p in wanted if not only or p & only]
    cover = Cover(wanted, REFUSED, options.seed, options.size or SIZE)
    for line in Path(options.after).read_text().splitlines() if options.after else ():
        known = json.loads(line)
        if known["word"] == "equal":
            cover.done(known["program"])
    if options.list:
        count = 0
        for program in cover:
            print(*sorted(program))
            cover.done(program)
            count += 1
        print(f"{len(wanted)} pairs, {count} programs")
        return
    until = time.time() + options.seconds
    with open(options.out or os.devnull, "a") as out:
        for line in hunt(cover, judge, until, shrinks=not options.no_shrink):
            out.write(json.dumps(line) + "\n")
            out.flush()
    print(f"{len(wanted)} pairs, of which {len(cover.left)} have not been in a program that ran")


if __name__ == "__main__":
    main()
