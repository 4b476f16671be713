"""The report of a trained model: table, pictures, curves.

`python -m examples.characters.report` evaluates `model.pt` in `--out` and writes beside it

    report.md         the table, with the conditions
    results.json      its numbers
    neighbours.png    test glyphs and their nearest neighbours in the hard gallery
    identity.png      one test character in all designs
    training.png      loss and validation rank-1 over the time
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from . import data, fonts, glyphs
from .evaluate import FARS, Result, evaluate, probe_rows
from .glyphs import Glyphs
from .model import Backbone, embed
from .options import parse
from .terminal import Failure, guarded, say

QUERIES, NEIGHBOURS = 8, 5  # rows and columns of the picture, for each test typeface
RIGHT, WRONG, OTHER = "#1a9850", "#d73027", "#d0d0d0"


def main(argv: list[str] | None = None) -> None:
    """Evaluates the model in `--out`, prints the table and writes the files."""
    options = parse(argv, "examples.characters.report")
    model = options.out / "model.pt"
    if not model.exists():
        raise Failure(f"there is no {model}: train first, or say where with --out")
    backbone = Backbone()
    backbone.load_state_dict(torch.load(model, map_location="cpu", weights_only=True))
    log = json.loads((options.out / "log.json").read_text())
    known = glyphs.load(options)
    gallery, tests, _ = fonts.roles(known.names, options)
    parts = data.split(known.num_identities)
    results, entries, vectors = evaluate(backbone, known, parts, gallery, tests)

    matplotlib.use("Agg")
    queries = {known.names[test]: probe_rows(known, parts.test, test, entries) for test in tests}
    neighbours(backbone, known, queries, entries, vectors, options.out / "neighbours.png")
    identity(known, parts, tests, options.out / "identity.png")
    curves(log, options.out / "training.png")
    (options.out / "results.json").write_text(
        json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n"
    )
    header, lines = table(results)
    about = conditions(log, known, parts, known.names[gallery])
    (options.out / "report.md").write_text(markdown(header, lines, about))
    say(terminal(header, lines))
    say(about)
    say(f"written: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    say(f"     to: {options.out}")


def table(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table; a raw-pixel result stands beside the network's."""
    measures = ["rank-1", *(f"TAR@FAR {far:.0e}".replace("e-0", "e-") for far in FARS)]
    header = ["typeface", "gallery", "entries", "probes"]
    header += [f"{measure} {of}" for measure in measures for of in ("pixels", "network")]
    by_key = {(r.typeface, r.gallery, r.method): r for r in results}
    lines = []
    for result in results:
        if result.method != "network":
            continue
        pixels = by_key[result.typeface, result.gallery, "raw pixels"]
        line = [result.typeface, result.gallery, f"{result.entries:,}", f"{result.probes:,}"]
        for raw, network in zip((pixels.rank1, *pixels.tar), (result.rank1, *result.tar), strict=True):
            line += [_percent(raw), _percent(network)]
        lines.append(line)
    return header, lines


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.2f} %"


def terminal(header: list[str], lines: list[list[str]]) -> str:
    """The table for a terminal; the headers of the measures take two lines."""
    tops = [name.rpartition(" ")[0] for name in header]
    bottoms = [name.rpartition(" ")[2] for name in header]
    rows = [tops, bottoms, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]

    def text(row: list[str]) -> str:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        return "  ".join(left + right)

    rule = "─" * (sum(widths) + 2 * len(widths) - 2)
    return "\n".join(["", text(tops), text(bottoms), rule, *map(text, lines), rule])


def markdown(header: list[str], lines: list[list[str]], about: str) -> str:
    """The report as a Markdown file."""
    marks = [":--"] * 2 + ["--:"] * (len(header) - 2)
    rows = "\n".join(f"| {' | '.join(row)} |" for row in [header, marks, *lines])
    pictures = (
        ("Nearest neighbours in the hard gallery", "neighbours.png"),
        ("One character in all designs", "identity.png"),
        ("Training", "training.png"),
    )
    shown = "\n\n".join(f"![{title}]({name})" for title, name in pictures)
    return f"# Characters never seen, in typefaces never seen\n\n{rows}\n\n{about}\n\n{shown}\n"


def conditions(log: dict[str, Any], known: Glyphs, parts: data.Split, gallery: str) -> str:
    """In words: what was trained on what, for how long, and what the columns mean."""
    return (
        f"Trained on {len(parts.train):,} characters in {len(log['designs'])} designs for "
        f"{log['seconds'][-1]:.0f} s on {log['ranks']} ranks of {log['device']}: "
        f"{log['images']:,} glyphs, {log['images_per_second']:,.0f}/s, "
        f"sample rate {log['options']['sample_rate']:g}.\n"
        f"Gallery: {gallery}, test characters (plain), with all others as distractors (hard). "
        "None of the probes' characters or typefaces was trained on."
    )


def neighbours(
    backbone: Backbone,
    known: Glyphs,
    queries: dict[str, NDArray[np.int64]],
    entries: NDArray[np.int64],
    vectors: Tensor,
    path: Path,
) -> None:
    """Draws test glyphs with their nearest neighbours, right ones framed green, a wrong best match red.

    The glyphs are a fixed random draw of each typeface; where the network errs, the last two rows are errors.

    Args:
        backbone: the network.
        known: the glyphs.
        queries: typeface to the rows [P] of its probes.
        entries: the rows [G] of the gallery.
        vectors: their embeddings [G, 128].
        path: the picture.
    """
    random = np.random.default_rng(data.SPLIT_SEED)
    columns = NEIGHBOURS + 1
    figure = plt.figure(figsize=(0.88 * (columns + 0.6) * len(queries), 1.12 * QUERIES + 0.8))
    blocks = figure.subfigures(1, len(queries), squeeze=False)[0]
    for block, (typeface, probes) in zip(blocks, queries.items(), strict=True):
        rows = random.permutation(probes)
        scores, best = (embed(backbone, known.images, rows) @ vectors.T).topk(NEIGHBOURS)
        found = entries[best.numpy()]
        wrong = known.identity[found[:, 0]] != known.identity[rows]
        errors = np.flatnonzero(wrong)[:2]
        shown = np.concatenate([np.setdiff1d(np.arange(QUERIES), errors), errors])[-QUERIES:]
        block.suptitle(f"{typeface}: probe and nearest in the gallery", fontsize=13, fontweight="bold", y=0.985)
        axes = block.subplots(QUERIES, columns, squeeze=False)
        block.subplots_adjust(0.03, 0.03, 0.97, 0.94, wspace=0.18, hspace=0.42)
        for line, query in zip(axes[: len(shown)], shown, strict=True):
            _glyph(line[0], known, rows[query], f"U+{known.codepoint[rows[query]]:04X}")
            for axis, row, value in zip(line[1:], found[query], scores[query].tolist(), strict=True):
                right = known.identity[row] == known.identity[rows[query]]
                frame = RIGHT if right else WRONG if axis is line[1] else OTHER
                _glyph(axis, known, row, f"{value:.2f}", frame)
        for axis in axes[len(shown) :].flat:
            axis.set_axis_off()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _glyph(axis: Axes, known: Glyphs, row: int, label: str, frame: str | None = None) -> None:
    axis.imshow(255 - known.images[row], cmap="gray", vmin=0, vmax=255)
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel(label, fontsize=8, labelpad=2)
    for spine in axis.spines.values():
        spine.set(visible=frame is not None, color=frame, linewidth=1 if frame == OTHER else 3)


def identity(known: Glyphs, parts: data.Split, tests: list[int], path: Path) -> None:
    """Draws the test character that most designs have, the first such, in all of them."""
    rows = data.rows_of(known, parts.test, list(range(len(known.names))))
    ids, counts = np.unique(known.identity[rows], return_counts=True)
    rows = rows[known.identity[rows] == ids[counts.argmax()]]
    across = min(7, len(rows))
    down = -(-len(rows) // across)
    figure, axes = plt.subplots(down, across, figsize=(1.75 * across, 2.1 * down + 0.4), squeeze=False)
    figure.suptitle(f"U+{known.codepoint[rows[0]]:04X}, a test character; test typefaces in green")
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis, row in zip(axes.flat[: len(rows)], rows, strict=True):
        design = int(known.design[row])
        _glyph(axis, known, row, known.names[design], RIGHT if design in tests else OTHER)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(log: dict[str, Any], path: Path) -> None:
    """Draws the loss of every step, smoothed, and the validation rank-1, over the seconds."""
    seconds, loss = np.array(log["seconds"]), np.array(log["loss"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(seconds, loss, color="#9ecae1", linewidth=0.8, label="each step")
    left.plot(seconds, _smooth(loss), color="#08519c", label="running mean")
    left.set(title="loss of the whole batch", xlabel="seconds of training", ylim=(0, None))
    left.legend(frameon=False)
    times, values = np.array(log["validation"]).reshape(-1, 2).T
    right.plot(times, 100 * values, "o-", color=RIGHT)
    right.set(
        title="rank-1 on validation characters, training typefaces",
        xlabel="seconds of training",
        ylabel="%",
        ylim=(0, 102),
        xlim=(0, None),
    )
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _smooth(values: NDArray[np.float64], window: int = 25) -> NDArray[np.float64]:
    """The mean of the last `window` values (fewer at the start), [n] to [n]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    smooth: NDArray[np.float64] = (total[last] - total[first]) / (last - first)
    return smooth


if __name__ == "__main__":
    guarded(main)
