"""Times forward and backward of the loss, and its memory, beside a materialised one and the matmuls it cannot avoid.

Times are medians over rounds in which the contenders take turns. Memory is what a step adds to the resident set at its
peak, the weight's gradient included, in a process of its own.
"""

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torch_pfc

from .materialised import Materialised


class Case(NamedTuple):
    """One size: rows, width, classes and the part of them that is sampled."""

    rows: int
    dim: int
    num_classes: int
    sample_rate: float


CASES = [Case(512, 512, 100_000, 1.0), Case(512, 512, 1_000_000, 0.1)]
SCALE, MARGIN = 64.0, 0.4


def make(name: str, case: Case) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns a function that runs one forward and backward, or the bare matmuls, and one that drops the gradients."""
    torch.manual_seed(0)
    embeddings = torch.randn(case.rows, case.dim, requires_grad=True)
    labels = torch.randint(case.num_classes, (case.rows,))
    if name == "three matmuls":
        num_sampled = int(case.num_classes * case.sample_rate)
        return functools.partial(matmuls, embeddings.detach(), num_sampled), lambda: None
    if name == "torch_pfc":
        head: torch.nn.Module = torch_pfc.PartialFC(
            case.dim,
            case.num_classes,
            margin=torch_pfc.CosFace(MARGIN),
            scale=SCALE,
            sample_rate=case.sample_rate,
            sparse_grad=True,
        )
    else:
        head = Materialised(case.dim, case.num_classes, case.sample_rate, SCALE, MARGIN)
    loss_of = torch.compile(head) if name.endswith("compiled") else head

    def release() -> None:
        for tensor in (embeddings, *head.parameters()):
            tensor.grad = None

    def step() -> None:
        release()
        loss_of(embeddings, labels).backward()

    return step, release


def matmuls(embeddings: Tensor, num_classes: int) -> None:
    """Logits and both gradients: what any exact method multiplies."""
    weight = torch.empty(num_classes, embeddings.shape[1])
    logits = weight @ embeddings.T
    logits.T @ weight
    logits @ embeddings


CONTENDERS = ["three matmuls", "materialised, eager", "materialised, compiled", "torch_pfc"]


def times(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of each contender."""
    steps = {name: make(name, case)[0] for name in CONTENDERS}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_growth(name: str, case: Case) -> float:
    """Megabytes by which a step, not the first, raises this process's resident set at its peak (Linux)."""
    step, release = make(name, case)
    step()
    release()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def main() -> None:
    """Prints a table for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of alternating runs (default: 7)")
    rounds = parser.parse_args().rounds
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        print(
            f"\nforward + backward, N={case.rows} D={case.dim} C={case.num_classes:,} rate {case.sample_rate}, float32"
        )
        print(f"{'':24}{'seconds':>10}{'ratio':>8}{'peak growth':>14}")
        medians = times(case, rounds)
        for name, seconds in medians.items():
            with ProcessPoolExecutor(1, context) as pool:
                growth = pool.submit(peak_growth, name, case).result()
            print(f"{name:24}{seconds:10.2f}{seconds / medians['torch_pfc']:8.2f}{growth:11.0f} MB")
