"""Records as tables, for a terminal or a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from .contenders import FLOOR, FUSED, OURS

Record = dict[str, Any]

# What the suite `growth` lets grow.
AXIS_NAMES = {"N": "rows N", "D": "width D", "S": "sampled classes S", "K": "classes K, same S"}


class Table(NamedTuple):
    """The first column is text, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]


def tables(records: Iterable[Record]) -> list[Table]:
    """One for each suite and size, in the order of the records."""
    made = []
    for suite, of_suite in groupby(records, key=lambda record: record["suite"]):
        if suite == "growth":
            made.append(_growth(list(of_suite)))
            continue
        for _, of_case in groupby(of_suite, key=lambda record: record["case"]):
            made.append(_MAKERS[suite](list(of_case)))
    return made


def median(record: Record) -> float:
    """Seconds."""
    return statistics.median(record["seconds"])


def exponent(records: list[Record]) -> float:
    """p of "time grows as factor to the power p": the slope of a line through the logarithms."""
    factors = [math.log(record["factor"]) for record in records]
    return statistics.linear_regression(factors, [math.log(median(record)) for record in records]).slope


def size(case: dict[str, Any]) -> str:
    """A case in words."""
    words = f"N={case['rows']} D={case['dim']} C={case['num_classes']:,} rate {case['sample_rate']:g}, {case['dtype']}"
    return words if case["weight_dtype"] == "float32" else f"{words}, weight {case['weight_dtype']}"


def _loss(records: list[Record]) -> Table:
    references = {f"× {name}": _time_of(records, name) for name in (FLOOR, OURS)}
    return _compared("forward + backward", records, references)


def _step(records: list[Record]) -> Table:
    return _compared("whole step", records, {f"× {name}": _time_of(records, name) for name in (OURS, FUSED)})


def _compared(what: str, records: list[Record], references: dict[str, float]) -> Table:
    rows = [
        [
            record["contender"],
            *_seconds(record),
            *(f"{median(record) / reference:.2f}" for reference in references.values()),
            f"{record['peak_growth_mb']:,.0f}" if "peak_growth_mb" in record else "",
        ]
        for record in records
    ]
    header = ["contender", "seconds", "min … max", *references, "peak growth, MB"]
    return Table(f"{what}, {size(records[0]['case'])}", header, rows)


def _growth(records: list[Record]) -> Table:
    rows = []
    for axis, group in groupby(records, key=lambda record: record["axis"]):
        points = list(group)
        times = " / ".join(f"{median(point):.3f}" for point in points)
        peaks = " / ".join(f"{point['peak_growth_mb']:.0f}" for point in points)
        rows.append([AXIS_NAMES[axis], times, f"{exponent(points):.2f}", peaks])
    factors = " / ".join(f"×{factor}" for factor in sorted({record["factor"] for record in records}))
    header = ["what is doubled", f"seconds at {factors}", "exponent", f"peak growth, MB, at {factors}"]
    return Table(f"growth of a whole step, fused, from {size(records[0]['case'])}", header, rows)


def _sample(records: list[Record]) -> Table:
    step = _time_of(records, FUSED)
    rows = [[record["contender"], *_seconds(record), f"{100 * median(record) / step:.1f} %"] for record in records]
    return Table(f"sampling, {size(records[0]['case'])}", ["contender", "seconds", "min … max", "of the step"], rows)


def _ranks(records: list[Record]) -> Table:
    one = median(records[0])
    rows = [
        [
            record["contender"],
            *_seconds(record),
            f"{one / median(record):.2f}",
            f"{100 * record['collectives']:.1f} %",
        ]
        for record in records
    ]
    header = ["one thread each", "seconds", "min … max", "speed-up", "in collectives"]
    return Table(f"ranks, whole step, fused, {size(records[0]['case'])}", header, rows)


def _ten_million(records: list[Record]) -> Table:
    rows = [[record["contender"], *_seconds(record), f"{record['peak_mb'] / 1000:.2f}"] for record in records]
    header = ["contender", "seconds a step", "min … max", "peak of the process, GB"]
    return Table(f"ten steps, {size(records[0]['case'])}", header, rows)


_MAKERS = {"loss": _loss, "step": _step, "sample": _sample, "ranks": _ranks, "ten_million": _ten_million}


def _time_of(records: list[Record], contender: str) -> float:
    (record,) = [record for record in records if record["contender"] == contender]
    return median(record)


def _seconds(record: Record) -> list[str]:
    """The median, and the range."""
    return [f"{median(record):.3f}", f"{min(record['seconds']):.3f} … {max(record['seconds']):.3f}"]


def as_text(table: Table) -> str:
    """For a terminal."""
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]

    def text(line: list[str]) -> str:
        first, *numbers = line
        return "  ".join([first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])

    rule = "─" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join([table.title, rule, text(table.header), rule, *map(text, table.rows), ""])


def as_markdown(table: Table) -> str:
    """For a page."""
    marks = [":--"] + ["--:"] * (len(table.header) - 1)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in [table.header, marks, *table.rows])
    return f"**{table.title[0].upper()}{table.title[1:]}**\n\n{lines}\n"


def about(machine: dict[str, Any]) -> str:
    """The machine in a line."""
    rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in machine["matmul_gflops"].items())
    return (
        f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, {machine['memory_gb']:.0f} GB, "
        f"{machine['capability']}, torch {machine['torch']}, commit {machine['commit']}, {machine['date'][:10]}. "
        f"Matmul of square matrices, GFLOP/s: {rates}."
    )
