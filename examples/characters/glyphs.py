"""Glyphs: which characters, rendered how, cached where, and which of them are one identity.

The cache is one folder per fingerprint of its inputs, made under another name and renamed when
whole:

    images.npy   uint8 [M, 40, 40]   grey glyphs, 255 = ink; design after design, by code point
    index.npz    codepoint int32 [M], design int16 [M], identity int32 [M] (-1: not to be used),
                 names [T] of the designs

`python -m examples.characters.glyphs` fills it and does nothing else.
"""

import dataclasses
import hashlib
import itertools
import multiprocessing
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from . import fonts
from .options import Options, num_cpus, parse
from .terminal import BAR, Failure, guarded, say

VERSION = 1  # raise it when the images or the index come out differently
SIDE = 40  # pixels of a glyph image, each way
EM = 36  # pixels per em: ink that reaches beyond the em box still fits
MIN_DESIGNS = 6  # a character is used when this many designs have it (or all, where there are fewer)
MIN_IDENTICAL = 2  # two characters drawn alike in this many designs are one identity
MAX_ALIKE = 8  # a bitmap that one design shows for more characters is its "no such glyph" box
CHUNK = 256  # characters per job of a worker
RANGES = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x2F7FF), (0x30000, 0x3FFFF))


@dataclasses.dataclass(frozen=True)
class Glyphs:
    """The rendered set.

    Attributes:
        images: uint8 [M, SIDE, SIDE], a memory map.
        codepoint: [M] the character drawn.
        design: [M] position in `names`.
        identity: [M] the class, 0 .. num_identities-1, or -1 for a blank or missing glyph.
        names: the designs.
    """

    images: NDArray[np.uint8]
    codepoint: NDArray[np.int32]
    design: NDArray[np.int16]
    identity: NDArray[np.int32]
    names: list[str]

    @property
    def num_identities(self) -> int:
        """How many different characters there are, after merging."""
        return int(self.identity.max()) + 1


def load(options: Options) -> Glyphs:
    """The glyphs of these options, from the cache or rendered into it.

    Raises:
        Failure: the fonts cannot be had, or share too few characters.
    """
    where = fonts.folder(options)
    target = options.cache / f"glyphs-{_fingerprint(where, options)}"
    if not target.is_dir():
        work = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        work.mkdir(parents=True)
        try:
            _build(fonts.designs_in(where), options, work)
            fonts.put(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    index = np.load(target / "index.npz")
    return Glyphs(
        images=np.load(target / "images.npy", mmap_mode="r"),
        codepoint=index["codepoint"],
        design=index["design"],
        identity=index["identity"],
        names=index["names"].tolist(),
    )


def _fingerprint(where: Path, options: Options) -> str:
    """Of everything the images depend on; font files count by name, size and date."""
    seen = [
        (str(path.relative_to(where)), path.stat().st_size, path.stat().st_mtime_ns) for path in fonts.files_in(where)
    ]
    rules = (VERSION, SIDE, EM, MIN_DESIGNS, MIN_IDENTICAL, MAX_ALIKE, RANGES)
    what = repr((seen, rules, options.max_characters))
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def coverage(path: Path) -> NDArray[np.int32]:
    """The ideographs [n] (code points, ascending) that a font file has a glyph for."""
    with TTFont(path, fontNumber=0, lazy=True) as font:
        cmap = font.getBestCmap() or {}
    have = np.array([code for code, glyph in cmap.items() if glyph != ".notdef"], dtype=np.int32)
    inside = np.zeros(len(have), dtype=bool)
    for first, last in RANGES:
        inside |= (have >= first) & (have <= last)
    return np.sort(have[inside])


def _build(designs: list[fonts.Design], options: Options, work: Path) -> None:
    paths = [path for design in designs for path in design.files]
    context = multiprocessing.get_context("forkserver")
    with context.Pool(num_cpus()) as pool:
        found = pool.imap(coverage, paths)
        bar = tqdm(zip(paths, found, strict=True), "coverage", len(paths), unit=" files", **BAR)
        have = dict(bar)
        characters = _choose(designs, have, options.max_characters)
        jobs = []
        start = 0
        codepoints, design_of = [], []
        for number, design in enumerate(designs):
            left = characters
            for path in design.files:
                mine = np.intersect1d(left, have[path])
                left = np.setdiff1d(left, mine)
                for first in range(0, len(mine), CHUNK):
                    chunk = mine[first : first + CHUNK]
                    jobs.append((path, work / "images.npy", start, chunk))
                    start += len(chunk)
                codepoints.append(mine)
                design_of.append(np.full(len(mine), number, dtype=np.int16))
        images = np.lib.format.open_memmap(work / "images.npy", mode="w+", dtype=np.uint8, shape=(start, SIDE, SIDE))
        with tqdm(total=start, desc="render", unit=" glyphs", unit_scale=True, **BAR) as bar:
            for done in pool.imap_unordered(_render, jobs):
                bar.update(done)
    codepoint, owner = np.concatenate(codepoints), np.concatenate(design_of)
    identity = identities(images, codepoint, owner)
    # Flushed before the folder gets its final name: what has that name is whole.
    images.flush()
    names = np.array([design.name for design in designs])
    np.savez(work / "index.npz", codepoint=codepoint, design=owner, identity=identity, names=names)


def _choose(designs: list[fonts.Design], have: dict[Path, NDArray[np.int32]], limit: int | None) -> NDArray[np.int32]:
    """The characters [n] that enough designs have; the first `limit` of them."""
    count: Counter[int] = Counter()
    covering = 0
    for design in designs:
        codes = np.unique(np.concatenate([have[path] for path in design.files]))
        covering += len(codes) > 0
        count.update(codes.tolist())
    needed = min(MIN_DESIGNS, max(covering, 2))
    chosen = sorted(code for code, designs_with_it in count.items() if designs_with_it >= needed)
    if len(chosen) < 100:
        raise Failure(
            f"only {len(chosen)} ideographs are in {needed} of these {covering} typefaces; at least 100 are needed"
        )
    return np.array(chosen[:limit], dtype=np.int32)


_opened: dict[Path, ImageFont.FreeTypeFont] = {}


def _render(job: tuple[Path, Path, int, NDArray[np.int32]]) -> int:
    """In a worker: draws a chunk of characters into their rows of the image file."""
    path, file, start, codes = job
    if path not in _opened:
        _opened.clear()  # jobs come font by font, and an open font takes its file's size in memory
        _opened[path] = ImageFont.truetype(path, EM, layout_engine=ImageFont.Layout.BASIC)
    images = np.load(file, mmap_mode="r+")
    for row, code in enumerate(codes.tolist(), start=start):
        images[row] = draw(_opened[path], code)
    return len(codes)


def draw(font: ImageFont.FreeTypeFont, code: int) -> NDArray[np.uint8]:
    """The glyph of one character, uint8 [SIDE, SIDE], its ink centred."""
    sheet = Image.new("L", (4 * SIDE, 4 * SIDE))
    ImageDraw.Draw(sheet).text((2 * SIDE, 2 * SIDE), chr(code), 255, font, anchor="mm")
    left, top, right, bottom = sheet.getbbox() or (0, 0, SIDE, SIDE)
    x, y = (left + right - SIDE) // 2, (top + bottom - SIDE) // 2
    return np.asarray(sheet.crop((x, y, x + SIDE, y + SIDE)))


def identities(images: NDArray[np.uint8], codepoint: NDArray[np.int32], design: NDArray[np.int16]) -> NDArray[np.int32]:
    """The class of each glyph: characters that are drawn alike in several designs are one.

    Two characters with the same bitmap in `MIN_IDENTICAL` designs could not be told apart there,
    and with one of them in training and the other in the test the split would leak.

    Args:
        images: uint8 [M, SIDE, SIDE].
        codepoint: [M].
        design: [M].

    Returns:
        int32 [M], from 0 without gaps in the order of the lowest code point; -1 for blank glyphs
        and for the box a font shows in place of a glyph it lacks.
    """
    usable = np.ones(len(images), dtype=bool)
    pairs: Counter[tuple[int, int]] = Counter()
    for number in np.unique(design):
        rows = np.flatnonzero(design == number)
        alike: dict[bytes, list[int]] = {}
        for row in rows.tolist():
            alike.setdefault(hashlib.blake2b(images[row], digest_size=16).digest(), []).append(row)
        for same in alike.values():
            if len(same) > MAX_ALIKE or not images[same[0]].any():
                usable[same] = False
            elif len(same) > 1:
                pairs.update(itertools.combinations(sorted(codepoint[same].tolist()), 2))
    parent: dict[int, int] = {code: code for code in np.unique(codepoint[usable]).tolist()}

    def root(code: int) -> int:
        while parent[code] != code:
            parent[code] = parent[parent[code]]
            code = parent[code]
        return code

    for (one, other), times in pairs.items():
        if times >= MIN_IDENTICAL:
            low, high = sorted((root(one), root(other)))
            parent[high] = low
    roots = {code: root(code) for code in parent}
    number_of = {code: number for number, code in enumerate(sorted(set(roots.values())))}
    return np.array(
        [number_of[roots[code]] if use else -1 for code, use in zip(codepoint.tolist(), usable.tolist(), strict=True)],
        dtype=np.int32,
    )


def main(argv: list[str] | None = None) -> None:
    """Fills the cache and says what is in it."""
    glyphs = load(parse(argv, "examples.characters.glyphs"))
    used = glyphs.identity >= 0
    say(f"{used.sum():,} glyphs of {glyphs.num_identities:,} characters in {len(glyphs.names)} typefaces")


if __name__ == "__main__":
    guarded(main)
