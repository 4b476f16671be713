"""One process of one thread against gloo ranks of one thread each, on the same global rows and classes."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from . import measure
from .contenders import Case, Inputs, fused_step

WORLD_SIZES = (1, 2)
# The operators that start a collective or wait for it, as the profiler names them.
COLLECTIVES = ("_c10d_functional::", "c10d::")


class Group:
    """`world_size` processes that step together when they are told to."""

    def __init__(self, case: Case, world_size: int) -> None:
        context = measure.context()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (case, rank, world_size, self._store.port, there)
            context.Process(target=_work, args=arguments, daemon=True).start()
            there.close()
            self._connections.append(here)

    def ask(self, what: str) -> list[float]:
        """Every rank's answer to "step", its seconds, or to "share": the part of a step spent in collectives."""
        for connection in self._connections:
            connection.send(what)
        return [connection.recv() for connection in self._connections]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()


def scaling(case: Case, rounds: int) -> dict[int, dict[str, Any]]:
    """Returns the seconds of each number of ranks, and the part of a step that its ranks spend in collectives."""
    with contextlib.ExitStack() as stack:
        groups = {size: stack.enter_context(_running(case, size)) for size in WORLD_SIZES}
        steps = {size: functools.partial(group.ask, "step") for size, group in groups.items()}
        seconds = measure.alternate(steps, rounds)
        return {
            size: {"seconds": seconds[size], "collectives": statistics.mean(group.ask("share"))}
            for size, group in groups.items()
        }


@contextlib.contextmanager
def _running(case: Case, world_size: int) -> Iterator[Group]:
    group = Group(case, world_size)
    try:
        yield group
    finally:
        group.close()


def _work(case: Case, rank: int, world_size: int, port: int, connection: Connection) -> None:
    os.environ["KINETO_LOG_LEVEL"] = "6"  # or the profiler writes lines of its own to the terminal
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=world_size
    )
    step = fused_step(Inputs(case, world_size))
    with contextlib.suppress(EOFError):  # the other end was closed: done
        while True:
            connection.send(measure.timed(step) if connection.recv() == "step" else _collective_share(step))
    dist.destroy_process_group()


def _collective_share(step: measure.Step) -> float:
    """The part of a step in which this rank starts collectives or waits for them: for the others, too."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        seconds = measure.timed(step)
    events = [event for event in profiler.key_averages() if event.key.startswith(COLLECTIVES)]
    return sum(event.self_cpu_time_total for event in events) / 1e6 / seconds
