"""`python -m benchmarks [suite …]`: tables on the terminal, results.json and benchmarks.png in `--out`."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import measure, picture, tables
from .suites import DEFAULT, SUITES, Options


def main() -> None:
    """Runs the suites, or shows what an earlier run found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; all but the last if none")
    parser.add_argument("--all", action="store_true", help="all suites")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it works, not how fast it is")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="default: runs/benchmarks")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="only draw an earlier run's results.json again")
    parser.add_argument("--markdown", type=Path, metavar="RESULTS", help="only print an earlier run's tables")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.suites if name not in SUITES]:
        parser.error(f"suites must be of {', '.join(SUITES)}, got {', '.join(unknown)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")

    if arguments.plot is not None:
        picture.draw(json.loads(arguments.plot.read_text()), arguments.plot.with_name("benchmarks.png"))
    elif arguments.markdown is not None:
        results = json.loads(arguments.markdown.read_text())
        print(tables.about(results["machine"]), *map(tables.as_markdown, tables.tables(results["records"])), sep="\n\n")
    else:
        names = list(SUITES) if arguments.all else arguments.suites or DEFAULT
        run(names, Options(arguments.rounds, arguments.quick), arguments.out)


def run(names: Sequence[str], options: Options, out: Path) -> None:
    """Prints each suite's tables when it is through; writes the files after each, so that an interrupt costs one."""
    out.mkdir(parents=True, exist_ok=True)
    results: dict = {"machine": measure.machine(options.quick), "records": []}
    print(tables.about(results["machine"]), "\n", flush=True)
    for name in names:
        start = time.monotonic()
        print(f"▸ {name}", file=sys.stderr, flush=True)
        records = list(SUITES[name](options))
        results["records"] += records
        for table in tables.tables(records):
            print(tables.as_text(table), flush=True)
        print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        picture.draw(results, out / "benchmarks.png")
    print(f"written: {out / 'results.json'}, {out / 'benchmarks.png'}")


if __name__ == "__main__":
    main()
