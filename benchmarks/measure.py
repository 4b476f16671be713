"""The rules of measuring, each in one place.

Time    of contenders that take turns (A B C A B C …), after an unmeasured turn each, in which they compile; garbage is
        collected between rounds and not within them. A contender drops its gradients within its own turn. Figures are
        medians.
Memory  what a step adds to a process's resident set at its peak, in a process of its own, at its second step: weight,
        optimizer state and whatever first steps cache are there before; what they freed was given back to the system,
        so that buffers which the next step takes again count. Linux with glibc.
Ratios  are of one run; seconds of two machines, or of two days, are not to be compared.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

Step = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")

WARM_UP = 1
# Processes are forked from one that has these imported and has done nothing else.
PRELOAD = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch_pfc", "benchmarks.contenders"]


def alternate(steps: Mapping[Name, Step], rounds: int) -> dict[Name, list[float]]:
    """Returns the seconds of each step, round by round."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        for name, step in steps.items():
            seconds[name].append(timed(step))
        gc.enable()
    return seconds


def timed(step: Step) -> float:
    """Returns the seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_growth(step: Step) -> float:
    """Megabytes by which a step raises this process's resident set at its peak."""
    for _ in range(WARM_UP):
        step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step()
    return resident_mb("VmHWM") - before


def resident_mb(field: str) -> float:
    """Megabytes (10⁶ bytes) of this process: VmRSS now, VmHWM at its peak."""
    return _kib("/proc/self/status", field) * 1024 / 1e6


def available_gb() -> float:
    """Gigabytes (10⁹ bytes) that processes may still allocate on this machine."""
    return _kib("/proc/meminfo", "MemAvailable") * 1024 / 1e9


def _kib(file: str, field: str) -> int:
    (line,) = [line for line in Path(file).read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1])


def context() -> Any:
    """How processes are started."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOAD)
    return forkserver


def in_own_process(fn: Callable[..., Result], *args: Any) -> Result:
    """Returns `fn(*args)` of a process that does nothing else, with as many threads as this one."""
    with ProcessPoolExecutor(1, context(), torch.set_num_threads, (torch.get_num_threads(),)) as pool:
        return pool.submit(fn, *args).result()


def matmul_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Gigaflops a second of a square matmul, all threads."""
    a = torch.randn(size, size).to(dtype)
    seconds = alternate({"matmul": lambda: a @ a}, rounds=5)["matmul"]
    return 2 * size**3 / statistics.median(seconds) / 1e9


def machine(quick: bool = False) -> dict[str, Any]:
    """Everything about this machine and this software that the figures depend on."""
    size = 128 if quick else 2048
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(_kib("/proc/meminfo", "MemTotal") * 1024 / 1e9, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "KMP_", "MKL_", "THP_MEM_"))},
        "matmul_gflops": {str(d).removeprefix("torch."): matmul_rate(d, size) for d in (torch.float32, torch.bfloat16)},
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """The checkout's commit, with a + where it has changes; None outside a checkout."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or None
