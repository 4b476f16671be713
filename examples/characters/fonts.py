"""Typefaces: fetch the packages, find the font files, group them into designs with a role.

A *design* is one typeface in one weight: "Noto Sans CJK JP" and "Noto Sans CJK JP Bold" are two. A
design may span several files (TW-Kai has three); for each character the first file that has it
draws it. Of a collection (`.ttc`) the first face is used: for Noto the Japanese one, for the Arphic
fonts the mainland Chinese one.
"""

import dataclasses
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from tqdm import tqdm

from .options import Options, num_cpus
from .terminal import BAR, Failure

# Families that continue another one. Their order is the order in which files are asked for a
# character, so the Japanese and sample variants of Unifont serve only where the main file has
# nothing.
CONTINUES = {
    "TW-Kai-Ext-B": "TW-Kai",
    "TW-Kai-Plus": "TW-Kai",
    "HanaMinA": "HanaMin",
    "HanaMinB": "HanaMin",
    "Unifont Upper": "Unifont",
    "Unifont-JP": "Unifont",
    "Unifont CSUR": "Unifont",
    "Unifont Sample": "Unifont",
}
PLAIN_STYLES = {"regular", "book", "normal", "roman", "medium", "light"}
APT = ("apt-get", "-qq", "-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User=")


@dataclasses.dataclass(frozen=True)
class Design:
    """One typeface in one weight, and the files that draw it, the preferred one first."""

    family: str
    style: str
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Family and weight, an ordinary weight left out."""
        return self.family if self.style.lower() in PLAIN_STYLES else f"{self.family} {self.style}"


def folder(options: Options) -> Path:
    """The folder of fonts: `--fonts`, or the packages fetched into the cache.

    Raises:
        Failure: no apt on this machine, or a package could not be fetched.
    """
    if options.fonts is not None:
        return options.fonts
    target = options.cache / ("fonts-smoke" if options.smoke else "fonts")
    if not target.is_dir():
        _fetch(options.packages, target)
    return target


def _fetch(packages: tuple[str, ...], target: Path) -> None:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise Failure(
                f"{tool} is not on this machine: give a folder of fonts instead, with --fonts DIR "
                f"(the demo's own are the Debian packages {', '.join(packages)})"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    (work / "debs").mkdir(parents=True)
    try:
        apt = list(APT)
        listing = _run([*apt, "download", "--print-uris", *packages], work / "debs")
        if listing.returncode:
            # No package lists (a bare container) or old ones: fetch them beside the fonts, which
            # needs no root.
            tqdm.write("  package lists are missing here: fetching them into the cache")
            apt += _private_lists(work)
            update = _run([*apt, "update"], work)
            listing = _run([*apt, "download", "--print-uris", *packages], work / "debs")
            if update.returncode or listing.returncode:
                raise Failure(
                    "apt-get does not know all of "
                    f"{', '.join(packages)}:\n{(update.stderr + listing.stderr).strip()}\n"
                    "run `apt-get update` as root, or give a folder of fonts with --fonts DIR"
                )
        size = sum(int(line.split()[2]) for line in listing.stdout.splitlines())
        _download([*apt, "download", *packages], work / "debs", size)
        debs = sorted((work / "debs").glob("*.deb"))
        with ThreadPoolExecutor(num_cpus()) as pool:
            done = pool.map(lambda deb: _run(["dpkg", "-x", str(deb), str(work / "tree")], work), debs)
            for deb, unpack in zip(debs, tqdm(done, "unpack", len(debs), unit=" packages", **BAR), strict=True):
                if unpack.returncode:
                    raise Failure(f"dpkg -x {deb.name} failed: {unpack.stderr.strip()}")
        put(work / "tree" / "usr" / "share", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def put(work: Path, target: Path) -> None:
    """Gives a finished folder its final name; where another process was faster, its folder stays."""
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _private_lists(work: Path) -> list[str]:
    for name in ("state/lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    return ["-o", f"Dir::State::lists={work}/state/lists", "-o", f"Dir::Cache={work}/cache"]


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def _download(command: list[str], cwd: Path, size: int) -> None:
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        with tqdm(total=size, desc="download", unit="B", unit_scale=True, **BAR) as bar:
            while process.poll() is None:
                time.sleep(0.2)
                bar.update(sum(f.stat().st_size for f in cwd.iterdir()) - bar.n)
            bar.update(sum(f.stat().st_size for f in cwd.iterdir()) - bar.n)
    finally:
        process.kill()
    _, errors = process.communicate()
    if process.returncode:
        raise Failure(f"apt-get download failed: {errors.strip()}")


def files_in(directory: Path) -> list[Path]:
    """All font files below `directory`, sorted."""
    kinds = {".ttf", ".otf", ".ttc", ".otc"}
    return sorted(path for path in directory.rglob("*") if path.suffix.lower() in kinds)


def designs_in(directory: Path) -> list[Design]:
    """The designs below `directory`, by name; files of one are in the order of `CONTINUES`, then size."""
    order = {family: rank for rank, family in enumerate(CONTINUES, start=1)}
    found: dict[tuple[str, str], list[tuple[int, int, Path]]] = {}
    for path in files_in(directory):
        with TTFont(path, fontNumber=0, lazy=True) as font:
            names = font["name"]
            family = names.getBestFamilyName() or path.stem
            style = names.getBestSubFamilyName() or "Regular"
        if family in CONTINUES:
            style = "Regular"
        key = (CONTINUES.get(family, family), style)
        found.setdefault(key, []).append((order.get(family, 0), -path.stat().st_size, path))
    designs = [
        Design(family, style, tuple(path for *_, path in sorted(files))) for (family, style), files in found.items()
    ]
    return sorted(designs, key=lambda design: design.name)


def roles(names: list[str], options: Options) -> tuple[int, list[int], list[int]]:
    """Which designs (positions in `names`) serve for what.

    Returns:
        The gallery design, the test designs (one per name in `--test-typefaces`), the training
        designs. All weights of a test family stay out of training; the gallery is also a training
        design.

    Raises:
        Failure: a name fits no design, or nothing is left to train on.
    """

    def matching(part: str) -> list[int]:
        hits = [i for i, name in enumerate(names) if part.lower() in name.lower()]
        if not hits:
            raise Failure(
                f"no typeface called {part!r} here; choose with --test-typefaces and --gallery from: {', '.join(names)}"
            )
        return sorted(hits, key=lambda i: (len(names[i]), i))

    wanted = [part.strip() for part in options.test_typefaces.split(",") if part.strip()]
    if not wanted:
        raise Failure("--test-typefaces must name at least one typeface, got an empty list")
    groups = [matching(part) for part in wanted]
    held_out = {i for group in groups for i in group}
    gallery = matching(options.gallery)[0]
    if gallery in held_out:
        raise Failure(f"the gallery {names[gallery]!r} is also a test typeface; keep them apart")
    train = [i for i in range(len(names)) if i not in held_out]
    if len(train) < 2:
        raise Failure(f"training needs at least 2 typefaces, got {[names[i] for i in train]}")
    return gallery, list(dict.fromkeys(group[0] for group in groups)), train
