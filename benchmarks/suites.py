"""What is measured at which sizes. A suite gives records, one for each case and contender."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import contenders, measure, ranks
from .contenders import Case, Contenders, Inputs

Record = dict[str, Any]

LOSS_CASES = [
    Case(512, 512, 100_000),
    Case(512, 512, 1_000_000, 0.1),
    Case(512, 512, 100_000, dtype="bfloat16"),
]
STEP_CASES = [
    Case(512, 512, 100_000),
    Case(512, 512, 1_000_000, 0.1),
    Case(512, 512, 1_000_000, 0.1, dtype="bfloat16"),
]
GROWTH_BASE, GROWTH_FACTORS = Case(256, 256, 200_000, 0.1), (1, 2, 4)
SAMPLE_CASES = [
    Case(512, 512, 1_000_000, 0.1),
    Case(512, 512, 10_000_000, 0.02, weight_dtype="bfloat16", momentum=0.0),
]
RANKS_CASE = Case(512, 512, 1_000_000, 0.1)
TEN_MILLION = Case(512, 512, 10_000_000, 0.02, weight_dtype="bfloat16", momentum=0.0)
TEN_MILLION_STEPS = 10
# Of the machine's memory, beyond the weight: Python, torch, tile buffers, and some margin.
SPARE_GB = 1.5


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run the suites.

    Attributes:
        rounds: turns of each contender.
        quick: sizes of a test instead of those above.
    """

    rounds: int = 5
    quick: bool = False

    def sized(self, case: Case) -> Case:
        if not self.quick:
            return case
        return dataclasses.replace(case, rows=case.rows // 16, dim=case.dim // 16, num_classes=case.num_classes // 200)

    def cases(self, cases: Sequence[Case]) -> Sequence[Case]:
        """All of them; of a quick run the last one alone."""
        return [self.sized(cases[-1])] if self.quick else cases


def loss(options: Options) -> Iterator[Record]:
    """Forward and backward of the loss."""
    for case in options.cases(LOSS_CASES):
        taking_part = dict(contenders.LOSS)
        if case.dtype == "float32":
            del taking_part[contenders.FLOAT_FLOOR]
        yield from compare("loss", case, taking_part, options)


def step(options: Options) -> Iterator[Record]:
    """A whole step: forward, backward, and SGD with momentum and weight decay."""
    for case in options.cases(STEP_CASES):
        yield from compare("step", case, contenders.STEP, options)


def compare(suite: str, case: Case, taking_part: Contenders, options: Options) -> Iterator[Record]:
    """Time in turns on shared inputs; then the memory of each that is more than a floor."""
    torch.compiler.reset()
    inputs = Inputs(case)
    seconds = measure.alternate({name: make(inputs) for name, make in taking_part.items()}, options.rounds)
    del inputs
    for name in taking_part:
        found: dict[str, Any] = {"seconds": seconds[name]}
        if name not in contenders.FLOORS:
            found["peak_growth_mb"] = measure.in_own_process(memory, suite, name, case)
        yield record(suite, case, name, **found)


def memory(suite: str, name: str, case: Case) -> float:
    """A job for a process of its own."""
    make = {"loss": contenders.LOSS, "step": contenders.STEP}[suite][name]
    return measure.peak_growth(make(Inputs(case)))


def growth(options: Options) -> Iterator[Record]:
    """A whole step with one quantity at a time doubled: rows N, width D, sampled classes S, classes K at the same S."""
    base = options.sized(GROWTH_BASE)
    cases = {(axis, factor): grown(base, axis, factor) for axis in "NDSK" for factor in GROWTH_FACTORS}
    # The largest weight holds those of all: views of its first elements.
    size = max(case.num_classes * case.dim for case in cases.values())
    storage = torch.randn(size).mul_(0.01), torch.zeros(size)
    # The base is on every axis, and measured once.
    steps = {case: contenders.fused_step(Inputs(case, storage=storage)) for case in cases.values()}
    seconds = measure.alternate(steps, options.rounds)
    del steps, storage
    peaks = {case: measure.in_own_process(memory, "step", contenders.FUSED, case) for case in seconds}
    for (axis, factor), case in cases.items():
        found = {"seconds": seconds[case], "peak_growth_mb": peaks[case]}
        yield record("growth", case, contenders.FUSED, axis=axis, factor=factor, **found)


def grown(base: Case, axis: str, factor: int) -> Case:
    """`base` with one quantity `factor` times as large, all others as they are."""
    changes: dict[str, dict[str, Any]] = {
        "N": {"rows": base.rows * factor},
        "D": {"dim": base.dim * factor},
        "S": {"sample_rate": base.sample_rate * factor},
        "K": {"num_classes": base.num_classes * factor, "sample_rate": base.sample_rate / factor},
    }
    return dataclasses.replace(base, **changes[axis])


def sample(options: Options) -> Iterator[Record]:
    """The draw of the classes, and the whole step that it is a part of."""
    for case in options.cases(SAMPLE_CASES):
        require_memory(case)
        inputs = Inputs(case)
        steps = {name: make(inputs) for name, make in contenders.SAMPLING.items()}
        seconds = measure.alternate(steps, options.rounds)
        del inputs, steps
        for name in contenders.SAMPLING:
            yield record("sample", case, name, seconds=seconds[name])


def across_ranks(options: Options) -> Iterator[Record]:
    """A whole step of one process, and of two gloo ranks that share its rows and classes; one thread each."""
    case = options.sized(RANKS_CASE)
    for world_size, found in ranks.scaling(case, options.rounds).items():
        yield record("ranks", case, f"{world_size} rank{'s' * (world_size > 1)}", world_size=world_size, **found)


def ten_million(options: Options) -> Iterator[Record]:
    """Ten steps of ten million classes in bfloat16, and the whole process's memory at its peak."""
    case = options.sized(TEN_MILLION)
    require_memory(case)
    yield record("ten_million", case, contenders.FUSED, **measure.in_own_process(_ten_steps, case))


def _ten_steps(case: Case) -> dict[str, Any]:
    run = contenders.fused_step(Inputs(case))
    seconds = [measure.timed(run) for _ in range(TEN_MILLION_STEPS)]
    return {"seconds": seconds, "peak_mb": measure.resident_mb("VmHWM")}


def require_memory(case: Case) -> None:
    """Ends the program where the weight of `case`, and its momentum, do not fit beside everything else."""
    copies = 2 if case.momentum else 1
    needed = copies * case.num_classes * case.dim * getattr(torch, case.weight_dtype).itemsize / 1e9 + SPARE_GB
    available = measure.available_gb()
    if needed > available:
        sys.exit(f"error: {case} needs {needed:.1f} GB of memory, {available:.1f} GB are available")


def record(suite: str, case: Case, contender: str, **found: Any) -> Record:
    """One line of results.json."""
    return {"suite": suite, "case": dataclasses.asdict(case), "contender": contender, **found}


SUITES: dict[str, Callable[[Options], Iterator[Record]]] = {
    "loss": loss,
    "step": step,
    "growth": growth,
    "sample": sample,
    "ranks": across_ranks,
    "ten_million": ten_million,
}
DEFAULT: Sequence[str] = [name for name in SUITES if name != "ten_million"]
