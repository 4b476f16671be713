"""Which collectives a step issues: the same ones in the same order on every rank, whatever the data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torch_pfc

from .inputs import IGNORE
from .ranks import run_ranks

DIM, NUM_CLASSES, ROWS = 8, 1000, 3


def collectives_of_a_step(options: dict[str, Any], ignored_ranks: list[int], frozen_ranks: list[int]) -> list[str]:
    """In order, each with the shape of what this rank puts in."""
    rank = dist.get_rank()
    is_fused = options.pop("fused", False)
    head = torch_pfc.PartialFC(DIM, options.pop("num_classes", NUM_CLASSES), **options)
    if is_fused:
        head.fuse(torch_pfc.optim.SparseSGD([head.weight]), torch_pfc.GradScaler("cpu"))
    head.weight.requires_grad_(rank not in frozen_ranks)
    x = torch.randn(ROWS, DIM, requires_grad=True)
    labels = torch.full((ROWS,), IGNORE) if rank in ignored_ranks else torch.arange(ROWS)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        head(x, labels).sum().backward()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [
        f"{event.name.removeprefix('_c10d_functional::')} {event.input_shapes[0]}"
        for event in events
        if event.name.startswith("_c10d_functional::") and not event.name.endswith("wait_tensor")
    ]


FORWARD = [f"all_gather_into_tensor [{ROWS}, {DIM}]", f"all_gather_into_tensor [{ROWS}]"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options, ignored, frozen",
    [
        ({}, [], []),
        ({"sample_rate": 0.1}, [], []),
        ({"sample_rate": 0.1, "sparse_grad": True}, [1], []),
        ({}, [0, 1, 2], []),
        ({"num_classes": 4, "sample_rate": 0.0}, [0], []),
        ({}, [], [1]),
        ({"saved_logits_bytes": 100}, [], [1]),
        ({"fused": True, "num_classes": 4, "sample_rate": 0.0}, [0], [1]),
    ],
    ids=str,
)
def test_every_step_issues_the_same(
    options: dict[str, Any], ignored: list[int], frozen: list[int], world_size: int
) -> None:
    """PB-44: nothing of size C crosses ranks, and a rank that has nothing to add takes part all the same."""
    total = world_size * ROWS
    expected = [
        *FORWARD,
        f"all_to_all_single [{total}, 2]",
        "all_gather_into_tensor [1]",
        f"reduce_scatter_tensor [{world_size}]",
        f"all_gather_into_tensor [{ROWS}, 3]",
        f"reduce_scatter_tensor [{total}, {DIM}]",
    ]
    assert run_ranks(world_size, collectives_of_a_step, options, ignored, frozen) == [expected] * world_size


@pytest.mark.parametrize(
    "options, scalars",
    [
        ({"reduction": "none"}, 0),
        ({"reduction": "mean"}, 1),
        ({"reduction": "none", "uneven_batches": True}, 1),
        ({"reduction": "sum", "uneven_batches": True}, 2),
    ],
    ids=str,
)
def test_scalars_are_exchanged_where_the_option_needs_them(options: dict[str, Any], scalars: int) -> None:
    for found in run_ranks(2, collectives_of_a_step, options, [], []):
        assert found.count("all_gather_into_tensor [1]") == scalars
