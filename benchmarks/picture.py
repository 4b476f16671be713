"""Results as one figure: bars for what contenders take, log-log lines for how it grows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .contenders import FLOORS, FUSED
from .tables import AXIS_NAMES, about, exponent, median

Record = dict[str, Any]

# Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = {
    "materialised, eager": "#999999",
    "materialised, compiled": "#E69F00",
    "torch_pfc": "#0072B2",
    "torch_pfc, logits kept": "#56B4E9",
    "torch_pfc, fused": "#009E73",
}
AXES = {
    "N": ("#0072B2", "o", "-"),
    "D": ("#E69F00", "s", "--"),
    "S": ("#009E73", "^", "-."),
    "K": ("#CC79A7", "D", ":"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes `path`: a panel for each suite that was run."""
    matplotlib.use("Agg")
    suites: dict[str, list[Record]] = {}
    for record in results["records"]:
        suites.setdefault(record["suite"], []).append(record)
    panels: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for suite, title in (("loss", "forward + backward"), ("step", "whole step, SGD with momentum")):
        if suite in suites:
            panels.append((_bars, (suites[suite], title, "seconds", median)))
            panels.append((_bars, (suites[suite], title, "peak growth, MB", lambda record: record["peak_growth_mb"])))
    if "growth" in suites:
        panels += [(_growth_of_time, (suites["growth"],)), (_growth_of_memory, (suites["growth"],))]
    for suite, title in (("sample", "sampling"), ("ranks", "ranks of one thread, the same work")):
        if suite in suites:
            panels.append((_lengths, (suites[suite], title)))
    if not panels:
        return

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(7 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axes, (panel, arguments) in zip(grid.flat, panels, strict=False):
        panel(axes, *arguments)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle("\n".join(textwrap.wrap(about(results["machine"]), 60 * columns)), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axes: Axes, records: list[Record], title: str, unit: str, value: Callable[[Record], float]) -> None:
    """Groups of bars, one for each size; a line across a group where its matmuls are."""
    groups = [list(group) for _, group in groupby(records, key=lambda record: record["case"])]
    names = [name for name in COLOURS if any(record["contender"] == name for record in records)]
    width = 0.8 / len(names)
    for place, group in enumerate(groups):
        by_name = {record["contender"]: record for record in group}
        for number, name in enumerate(names):
            left = place - 0.4 + number * width
            label = name if place == 0 else None
            bar = axes.bar(left, value(by_name[name]), width, align="edge", color=COLOURS[name], label=label)
            axes.bar_label(bar, fmt="%.2f" if unit == "seconds" else "%.0f", fontsize=6, padding=1)
        for name, dashes in zip(FLOORS, ((), (1, 1)), strict=True):
            if unit == "seconds" and name in by_name:
                height = value(by_name[name])
                ends = [place - 0.42, place + 0.42]
                axes.plot(ends, [height, height], color="black", linestyle=(0, dashes), label=name)
    axes.set_xticks(range(len(groups)), [_short(group[0]["case"]) for group in groups], fontsize=8)
    axes.set_title(f"{title}: {unit}", fontsize=10)
    axes.set_ylabel(unit)
    axes.margins(y=0.35)  # for the legend
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=7, loc="upper left", ncols=2)


def _growth_of_time(axes: Axes, records: list[Record]) -> None:
    """Log-log: a slope of 1 is linear."""
    for axis, points in _by_axis(records):
        label = f"{AXIS_NAMES[axis]}: exponent {exponent(points):.2f}"
        _line(axes, axis, points, [median(point) for point in points], label)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.3g}")
    _finish(axes, "seconds")


def _growth_of_memory(axes: Axes, records: list[Record]) -> None:
    for axis, points in _by_axis(records):
        _line(axes, axis, points, [point["peak_growth_mb"] for point in points], AXIS_NAMES[axis])
    axes.set_ylim(bottom=0)
    _finish(axes, "peak growth, MB")


def _by_axis(records: list[Record]) -> list[tuple[str, list[Record]]]:
    return [(axis, list(points)) for axis, points in groupby(records, key=lambda record: record["axis"])]


def _line(axes: Axes, axis: str, points: list[Record], values: list[float], label: str) -> None:
    colour, marker, style = AXES[axis]
    factors = [point["factor"] for point in points]
    axes.plot(factors, values, color=colour, marker=marker, linestyle=style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [f"×{factor}" for factor in factors])


def _finish(axes: Axes, unit: str) -> None:
    axes.set_title(f"growth of a fused step: {unit}", fontsize=10)
    axes.set_xlabel("one quantity, times that of the base")
    axes.set_ylabel(unit)
    axes.legend(fontsize=7)


def _lengths(axes: Axes, records: list[Record], title: str) -> None:
    """Horizontal bars of seconds, logarithmic."""
    names = [f"{record['contender']}, C = {record['case']['num_classes']:,}" for record in records]
    bars = axes.barh(names, [median(record) for record in records], color=COLOURS[FUSED])
    axes.bar_label(bars, fmt="%.3f", fontsize=7, padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(f"{title}: seconds", fontsize=10)
    axes.set_xlabel("seconds")


def _short(case: dict[str, Any]) -> str:
    return f"C = {case['num_classes']:,}\nrate {case['sample_rate']:g}, {case['dtype']}"
