"""Real gloo ranks for the tests: one pool of worker processes, started at the first job and kept for the session.

`run_ranks(world_size, fn, *args)` runs the module-level function `fn(*args)` on ranks 0 .. world_size-1 and returns
their results in rank order. In a job the default process group is a gloo world of that size. A job that raises, hangs
or kills a worker costs the pool, not the next test: its workers are killed and new ones are forked for the next job.

In some 20,000 jobs two workers died amid the collectives of torch 2.13 on a busy machine, once with glibc's word that
its heap was corrupted; what is tested here is Python alone. So a job whose worker crashes is run once more, and the
session's summary names it.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

MAX_WORLD_SIZE = 4
# A collective that a peer never joins ends with gloo's own error, which says more than a killed job.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=30)
# How long the other ranks may take to report after one has failed: the first cause is often not the first reported.
GRACE_S = 1.0
# What workers find imported when they are forked.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.testing",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "torch_pfc",
    "tests.ranks",
]


# Exit codes of a process that did not mean to end.
CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)}


class RankError(Exception):
    """A rank raised (with its traceback), died, or did not answer in time."""


class RankCrash(RankError):
    """A rank died of a signal that no job sends."""


class Pool:
    """`MAX_WORLD_SIZE` workers that share a store; `close` leaves no process behind."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._world_size = 0
        self._num_worlds = 0
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(MAX_WORLD_SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, there, self._store.port), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        if world_size != self._world_size:
            self._world_size = world_size
            self._num_worlds += 1
        # Plain pickle: multiprocessing's own would pass tensors as shared-memory file descriptors.
        job = pickle.dumps((world_size, self._num_worlds, fn, args))
        connections = self._connections[:world_size]
        for rank, connection in enumerate(connections):
            try:
                connection.send_bytes(job)
            except OSError:
                raise RankError(f"rank {rank} of {world_size} died before the job") from None
        rank_of: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        crashed = False
        deadline = time.monotonic() + timeout
        while waiting := [c for r, c in enumerate(connections) if r not in results]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answered in ready:
                rank = rank_of[answered]
                try:
                    succeeded, results[rank] = pickle.loads(connections[rank].recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_S)
                    code = self._processes[rank].exitcode
                    crashed |= code in CRASHES
                    succeeded, results[rank] = False, f"the process died, exit code {code}"
                if not succeeded:
                    failures.append(f"rank {rank} of {world_size}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise (RankCrash if crashed else RankError)("\n".join(failures))
        if len(results) < world_size:
            silent = [rank for rank in range(world_size) if rank not in results]
            raise RankError(f"no answer from ranks {silent} of {world_size} within {timeout} s")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


_pool: Pool | None = None
# What was run once more.
crashes: list[str] = []


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`[fn(*args) on rank 0, ..., on rank world_size-1]`; RankError with the traceback of each rank that failed."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"expected a world size from 1 to {MAX_WORLD_SIZE}, got {world_size}")
    try:
        return _run(world_size, fn, args, timeout)
    except RankCrash as crash:
        crashes.append(f"{fn.__module__}.{fn.__qualname__}{args} on {world_size} ranks: {crash}")
        return _run(world_size, fn, args, timeout)


def _run(world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    global _pool
    if _pool is None:
        _pool = Pool()
    try:
        return _pool.run(world_size, fn, args, timeout)
    except BaseException:
        close_pool()
        raise


def close_pool() -> None:
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def _work(rank: int, connection: Connection, port: int) -> None:
    """A worker's life: one job after another until the session ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    threading.Thread(target=_die_with_the_session, daemon=True).start()
    warnings.simplefilter("error")
    # Inductor imports a module of PyTorch that still scripts.
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    # Dynamo looks at the gradient of what one graph hands to the next, behind DDP's and fully_shard's graph breaks.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = 0
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        try:
            world_size, wanted_world, fn, args = pickle.loads(job)
            if wanted_world != world:
                if dist.is_initialized():
                    dist.destroy_process_group()
                world = wanted_world
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"world{world}", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=COLLECTIVE_TIMEOUT,
                )
            answer = pickle.dumps((True, fn(*args)))
        except BaseException as error:
            answer = pickle.dumps((False, f"{error!r}\n{traceback.format_exc()}"))
        try:
            connection.send_bytes(answer)
        except OSError:
            return


def _die_with_the_session() -> None:
    """A session that was itself killed cannot stop a worker that is busy in a job."""
    session = multiprocessing.parent_process()
    if session is not None:
        wait([session.sentinel])
        os._exit(1)
