"""The flags of the demo, in one place: every stage reads the same `Options`."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = (
    "fonts-noto-cjk",
    "fonts-droid-fallback",
    "fonts-wqy-zenhei",
    "fonts-arphic-uming",
    "fonts-arphic-ukai",
    "fonts-babelstone-han",
    "fonts-hanazono",
    "fonts-unifont",
    "fonts-ipamj-mincho",
    "fonts-cns11643-kai",
)
SMOKE_PACKAGES = ("fonts-droid-fallback", "fonts-wqy-zenhei", "fonts-unifont")

# What `--smoke` uses where the user says nothing else: enough to walk through every stage.
SMOKE_DEFAULTS: dict[str, Any] = {
    "test_typefaces": "Unifont",
    "gallery": "WenQuanYi Zen Hei",
    "seconds": 5.0,
}
SMOKE_CHARACTERS = 3000


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run was asked to do; the defaults are those of the full demo."""

    fonts: Path | None = None
    cache: Path = ROOT / ".cache" / "characters"
    out: Path = ROOT / "runs" / "characters"
    test_typefaces: str = "TW-Kai,IPAmj,Unifont"
    gallery: str = "Noto Sans"
    seconds: float = 120.0
    ranks: int = 2
    batch: int = 64
    sample_rate: float = 0.1
    seed: int = 0
    precision: str = "fp32"
    save_every: float = 15.0
    fresh: bool = False
    compile: bool = True
    smoke: bool = False

    def to_argv(self) -> list[str]:
        """The flags that `parse` turns back into these options."""
        argv = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if field.name == "compile":
                argv += [] if value else ["--no-compile"]
            elif isinstance(value, bool):
                argv += [flag] if value else []
            elif value is not None:
                argv += [flag, str(value)]
        return argv

    @property
    def max_characters(self) -> int | None:
        """How many characters are rendered at most; None: all."""
        return SMOKE_CHARACTERS if self.smoke else None

    @property
    def packages(self) -> tuple[str, ...]:
        """The Debian packages that hold the typefaces."""
        return SMOKE_PACKAGES if self.smoke else PACKAGES


def parse(argv: list[str] | None = None, stage: str = "examples.characters") -> Options:
    """Options from a command line (`sys.argv` if None).

    Raises:
        SystemExit: a flag is unknown or out of range (argparse prints why).
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {stage}",
        description="Open-set recognition of Chinese characters across typefaces with Partial FC.",
        argument_default=argparse.SUPPRESS,
    )
    default = Options()
    parser.add_argument("--fonts", type=Path, help="folder of fonts to use instead of Debian's")
    parser.add_argument("--cache", type=Path, help="fonts and glyphs (default .cache/characters)")
    parser.add_argument("--out", type=Path, help="model, report, pictures (runs/characters)")
    parser.add_argument(
        "--test-typefaces",
        help=f"family names (or parts), by commas, kept out of training ({default.test_typefaces})",
    )
    parser.add_argument("--gallery", help=f"family name (or part) of the gallery ({default.gallery})")
    parser.add_argument("--seconds", type=float, help=f"training time ({default.seconds:g})")
    parser.add_argument("--ranks", type=int, help=f"processes on this machine ({default.ranks})")
    parser.add_argument("--batch", type=int, help=f"glyphs per rank and step ({default.batch})")
    parser.add_argument("--sample-rate", type=float, help=f"of the classes per step ({default.sample_rate})")
    parser.add_argument("--seed", type=int, help=f"of weights and batches ({default.seed})")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help=f"of the steps ({default.precision})")
    parser.add_argument("--save-every", type=float, help=f"seconds between checkpoints ({default.save_every:g})")
    parser.add_argument("--fresh", action="store_true", help="begin anew where a training was interrupted")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--smoke", action="store_true", help="three small packages, seconds")
    given: dict[str, Any] = vars(parser.parse_args(argv))
    options = Options(**((SMOKE_DEFAULTS if given.get("smoke") else {}) | given))
    for name in ("seconds", "ranks", "batch", "save_every"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if not 0 <= options.sample_rate <= 1:
        parser.error(f"--sample-rate must be in [0, 1], got {options.sample_rate}")
    if options.fonts is not None and not options.fonts.is_dir():
        parser.error(f"--fonts must be a folder, got {options.fonts}")
    return options


def num_cpus() -> int:
    """CPUs this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
