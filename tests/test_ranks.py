"""The pool itself: what the other tests lean on."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from .ranks import RankError, crashes, run_ranks


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def total(value: torch.Tensor) -> torch.Tensor:
    value = value + dist.get_rank()
    dist.all_reduce(value)
    return value


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("a fault of one rank")
        if how == "die":
            os._exit(3)
        if how == "crash":
            os.abort()
        time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 3, 4, 2])
def test_results_come_in_rank_order(world_size: int) -> None:
    assert run_ranks(world_size, world) == [(rank, world_size) for rank in range(world_size)]


def test_tensors_go_in_and_come_out() -> None:
    for result in run_ranks(3, total, torch.ones(2)):
        torch.testing.assert_close(result, torch.full((2,), 6.0))


@pytest.mark.parametrize(
    "how, says",
    [
        ("raise", "a fault of one rank"),
        ("die", "rank 1 of 2: the process died, exit code 3"),
        ("crash", "rank 1 of 2: the process died, exit code -6"),
        ("hang", r"ranks \[1\]"),
    ],
)
def test_a_failed_job_reports_and_leaves_the_next_alone(how: str, says: str) -> None:
    num_crashes = len(crashes)
    with pytest.raises(RankError, match=says):
        run_ranks(2, fail_on, 1, how, timeout=2.0)
    assert len(crashes) == num_crashes + (how == "crash")
    del crashes[num_crashes:]
    assert multiprocessing.active_children() == []
    assert run_ranks(2, world) == [(0, 2), (1, 2)]


def crash_at_first(path: str) -> str:
    if dist.get_rank() == 0 and not os.path.exists(path):
        open(path, "w").close()
        os.abort()
    return "done"


def test_a_crash_is_tried_again_and_told(tmp_path: Path) -> None:
    num_crashes = len(crashes)
    assert run_ranks(2, crash_at_first, str(tmp_path / "crashed")) == ["done", "done"]
    (told,) = crashes[num_crashes:]
    del crashes[num_crashes:]
    assert "test_ranks.crash_at_first" in told and "rank 0 of 2: the process died, exit code -6" in told
