"""`python -m torch_pfc.plan`: prints what `torch_pfc.plan.plan` finds.

Exit status: 0, or 1 where the peak does not fit `--memory`, or 2 for input that no run could have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from . import DEVICES, DTYPES, OPTIMIZERS, Plan, plan

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_MAX_DIGITS = 18


def _whole(text: str) -> int:
    """A whole number: 93431, 1_000_000, 100e6."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or value.adjusted() >= _MAX_DIGITS or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number of at most {_MAX_DIGITS} digits, got {text!r}")
    return int(value)


def _at_least_1(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie in [0, 1], got {text}")
    return value


def _size(text: str) -> int:
    """Bytes: 80GB (80·10⁹), 80GiB (80·2³⁰), 80e9."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 80GB (10⁹ bytes), 80GiB (2³⁰) or 80e9, got {text!r}")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _memory(text: str) -> int:
    value = _size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 byte, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_pfc.plan",
        description="What a training step of torch_pfc.PartialFC takes on one rank, found by running it on fake "
        "tensors in a fake process group: memory, collectives, matrix products.",
        epilog="Exit status: 1 where the peak does not fit --memory, 2 for impossible input.",
    )
    add = parser.add_argument
    add("--classes", type=_at_least_1, required=True, metavar="C", help="classes in all: 93431, 1_000_000, 100e6")
    add("--dim", type=_at_least_1, required=True, metavar="D", help="width of the embeddings")
    add("--ranks", type=_at_least_1, default=1, metavar="W", help="processes that share the classes (default: 1)")
    add("--batch", type=_at_least_1, default=128, metavar="B", help="rows of each rank (default: 128)")
    add("--sample-rate", type=_rate, default=1.0, metavar="R", help="part of the classes a step scores (default: 1)")
    add("--dtype", choices=DTYPES, default="fp32", help="of weight and embeddings (default: fp32)")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="torch.optim's, or with sparse_ torch_pfc.optim's; momentum is SGD's (default: sgd)",
    )
    grad = parser.add_mutually_exclusive_group()
    grad.add_argument(
        "--sparse-grad",
        action="store_true",
        default=None,
        help="default: with a sample rate, for sgd and torch_pfc.optim's",
    )
    grad.add_argument("--dense-grad", action="store_false", dest="sparse_grad")
    grad.add_argument("--fused", action="store_true", help="no gradient: backward does the update (torch_pfc.optim's)")
    add(
        "--saved-logits",
        type=_size,
        default=0,
        metavar="SIZE",
        help="of the logits that forward may keep for backward, as for --memory (default: 0)",
    )
    add("--device", choices=DEVICES, default="cpu", help="whose sizes of work buffers to assume (default: cpu)")
    add("--rank", type=_whole, default=0, help="the one to plan for (default: 0; none has more classes)")
    add("--memory", type=_memory, metavar="SIZE", help="of a rank, to compare the peak with: 80GB, 80GiB, 80e9")
    add("--json", action="store_true", help="print JSON, in bytes and FLOP")
    return parser


def human(value: float, unit: str) -> str:
    """Three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def table(settings: dict[str, Any], found: Plan, memory: int | None) -> str:
    """The plan as text."""
    phases = [found.forward, found.backward, found.update]
    rows = [
        ("weight", [human(found.weight_bytes, "B")]),
        ("optimizer state", [human(found.optimizer_bytes, "B")]),
        ("gradient", [human(found.gradient_bytes, "B")]),
        ("activations", [human(found.activation_bytes, "B")]),
        ("", ["forward", "backward", "optimizer"]),
        ("matmuls", [human(phase.matmul_flops, "FLOP") for phase in phases]),
        ("collectives", [str(len(phase.collectives)) for phase in phases]),
        ("  put in", [human(sum(call.bytes_in for call in phase.collectives), "B") for phase in phases]),
        ("  got out", [human(sum(call.bytes_out for call in phase.collectives), "B") for phase in phases]),
        ("peak", [human(phase.peak_bytes, "B") for phase in phases]),
        ("peak of all", [human(found.peak_bytes, "B")]),
    ]
    gradient = "fused" if settings["fused"] else f"{'sparse' if found.sparse_grad else 'dense'} gradient"
    limit = settings["saved_logits_bytes"]
    saved = f", up to {human(limit, 'B')} of saved logits" if limit else ""
    lines = [
        f"{settings['num_classes']:,} classes of width {settings['embedding_dim']}, {settings['dtype']}, "
        f"sample rate {settings['sample_rate']:g}",
        f"rank {settings['rank']} of {settings['ranks']}: {found.num_local_classes:,} classes, "
        f"{settings['batch_size']} rows, {settings['device']}",
        f"{settings['optimizer']}, {gradient}{saved}",
        "",
        *(f"{name:16}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows),
    ]
    if memory is not None:
        spare = memory - found.peak_bytes
        verdict = "fits, {} to spare" if spare >= 0 else "does not fit, {} short"
        lines.append(f"{'memory':16}{human(memory, 'B'):>12}  {verdict.format(human(abs(spare), 'B'))}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, prints and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = {
        "num_classes": options.classes,
        "embedding_dim": options.dim,
        "ranks": options.ranks,
        "batch_size": options.batch,
        "sample_rate": options.sample_rate,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
        "sparse_grad": options.sparse_grad,
        "fused": options.fused,
        "saved_logits_bytes": options.saved_logits,
        "device": options.device,
        "rank": options.rank,
    }
    try:
        found = plan(**settings)
    except ValueError as error:
        parser.error(str(error))
    fits = options.memory is None or found.peak_bytes <= options.memory
    if options.json:
        answer = {"settings": settings, **dataclasses.asdict(found)}
        if options.memory is not None:
            answer |= {"memory_bytes": options.memory, "fits": fits}
        print(json.dumps(answer, indent=2))
    else:
        print(table(settings, found, options.memory))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
