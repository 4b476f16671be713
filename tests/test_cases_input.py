"""Labels, dtypes, groups and process set-up that people reported broken elsewhere, with the right values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_pfc
from torch_pfc import reference

from .inputs import (
    COSFACE,
    IGNORE,
    S1_COSFACE,
    Batch,
    Step,
    assemble,
    check_step,
    error_of,
    make_head,
    my_rows,
    run_head,
    s1,
)
from .ranks import run_ranks


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_all_rows_ignored(reduction: str, sample_rate: float, sparse_grad: bool) -> None:
    """PB-06: zero loss, gradients that are zero and there."""
    batch = s1()
    batch.labels.fill_(IGNORE)
    options = COSFACE | {"reduction": reduction, "sample_rate": sample_rate, "sparse_grad": sparse_grad}
    step = run_head(2, batch, options=options)
    assert not step.loss.any() and not step.embeddings_grad.any() and not step.weight_grad.any()


@pytest.mark.parametrize("ignore_index", [IGNORE, -1, 255, 3])
def test_rows_of_one_rank_ignored(ignore_index: int) -> None:
    """PB-06: the mean is over rank 0's rows, on both ranks; ignore_index may be any number, a class id too."""
    batch = s1()
    batch.labels[4:] = ignore_index
    step = run_head(2, batch, options=COSFACE | {"ignore_index": ignore_index})
    x, w = batch.embeddings.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    loss = reference.partial_fc_loss(
        x, w, batch.labels, margin=reference.cosface(0.35), scale=batch.scale, ignore_index=ignore_index
    )
    loss.backward()
    found = (step.loss, step.embeddings_grad, step.weight_grad)
    torch.testing.assert_close(found, (loss.detach(), x.grad, w.grad))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64, torch.int64]
)
@pytest.mark.parametrize("column", [False, True])
def test_labels_of_any_integer_dtype_and_as_a_column(dtype: torch.dtype, column: bool) -> None:
    """PB-08: the same loss, and the caller's labels are left alone."""
    batch = s1()
    head = make_head(batch, **COSFACE)
    labels = batch.labels.to(dtype).reshape((-1, 1) if column else (-1,))
    before = labels.clone()
    assert float(head(batch.embeddings, labels).detach()) == pytest.approx(S1_COSFACE[0], rel=1e-5)
    assert torch.equal(labels, before) and labels.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool])
def test_labels_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    """PB-08."""
    batch = s1()
    with pytest.raises(TypeError, match=f"labels must be integers, got {dtype}"):
        make_head(batch)(batch.embeddings, batch.labels.to(dtype))


@pytest.mark.parametrize("column", [False, True])
def test_one_row(column: bool) -> None:
    """PB-08: a batch of one is [1, D], its label [1] or [1, 1]."""
    batch = s1()
    labels = batch.labels[3:4].reshape((1, 1) if column else (1,))
    loss = make_head(batch, **COSFACE)(batch.embeddings[3:4], labels)
    expected = reference.partial_fc_loss(
        batch.embeddings[3:4], batch.weight, labels, margin=reference.cosface(0.35), scale=16.0
    )
    torch.testing.assert_close(loss.detach(), expected)


@contextmanager
def no_call_into_distributed() -> Iterator[None]:
    """Fails on any Python call into torch.distributed, and on any collective that a kernel issues."""
    calls = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/torch/distributed/" in frame.f_code.co_filename:
            calls.append(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert calls == []


@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.2}, {"uneven_batches": True}, {"sparse_grad": True}])
def test_a_process_without_a_group_calls_nothing_distributed(options: dict[str, Any]) -> None:
    """PB-20: S1 without init_process_group."""
    batch = s1()
    head = make_head(batch, **COSFACE, **options)
    x = batch.embeddings.requires_grad_()
    head(x, batch.labels).backward()  # what is imported once is imported here
    with no_call_into_distributed():
        loss = head(x, batch.labels)
        loss.backward()
    if not options.get("sample_rate"):
        assert float(loss.detach()) == pytest.approx(S1_COSFACE[0], rel=1e-5)


def test_a_gloo_world_of_one() -> None:
    """PB-20."""
    check_step(run_head(1, s1(), options=COSFACE), *S1_COSFACE)


def step_of_member(group: Any, process_group: dist.ProcessGroup) -> Step:
    """S1 in a part of the world."""
    batch, size = s1(), dist.get_world_size(process_group)
    head = make_head(batch, group=group, **COSFACE)
    x = my_rows(batch.embeddings, [8 // size] * size, process_group).requires_grad_()
    loss = head(x, my_rows(batch.labels, [8 // size] * size, process_group))
    loss.backward()
    assert x.grad is not None and head.weight.grad is not None
    return Step(loss.detach(), x.grad, head.weight.grad)


def step_in_group(groups: list[list[int]]) -> Step | None:
    """None where this rank is in none of the groups."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = [group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks]
    step = step_of_member(mine[0], mine[0]) if mine else None
    dist.barrier()
    for group in mine:
        dist.destroy_process_group(group)
    return step


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[1, 3]], [[0, 1, 2, 3]]], ids=str)
def test_groups_that_are_a_part_of_the_world(groups: list[list[int]]) -> None:
    """PB-35."""
    answers = run_ranks(4, step_in_group, groups)
    for ranks in groups:
        check_step(assemble([answers[rank] for rank in ranks]), *S1_COSFACE)
    assert all(answers[r] is None for r in range(4) if not any(r in ranks for ranks in groups))


def step_in_mesh() -> Step:
    shard = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    return step_of_member(shard, shard.get_group())


def test_a_dimension_of_a_device_mesh_as_group() -> None:
    """PB-35."""
    answers = run_ranks(4, step_in_mesh)
    for ranks in ([0, 1], [2, 3]):
        check_step(assemble([answers[rank] for rank in ranks]), *S1_COSFACE)


def head_with_full_weight(batch: Batch) -> tuple[tuple[str, str], tuple[str, str]]:
    head = make_head(batch)
    full = torch.nn.Parameter(batch.weight)
    loading = error_of(lambda: head.load_state_dict({"weight": full}))
    head.weight = full
    return error_of(lambda: head(batch.embeddings[:4], batch.labels[:4])), loading


def test_a_full_weight_where_a_shard_is_expected() -> None:
    """PB-37: an error that names both shapes, in the step and already when it is loaded."""
    for (kind, message), (_, loading) in run_ranks(2, head_with_full_weight, s1()):
        assert kind == "ValueError" and "[5, 4]" in message and "[10, 4]" in message
        assert "[5, 4]" in loading and "[10, 4]" in loading


def sets_of_two_shards(keys: list[int]) -> list[Tensor]:
    head = torch_pfc.PartialFC(4, 100, sample_rate=0.2)
    sets = [head.sample(torch.tensor([3, 60]), key=torch.tensor(key))[0] for key in keys]
    return [head.class_start + index for index in sets if index is not None]


def test_a_key_names_a_set() -> None:
    """PB-15: C = 100 on 2 ranks, rate 0.2: the same key twice, then another."""
    for rank, (first, again, other) in enumerate(run_ranks(2, sets_of_two_shards, [8, 8, 9])):
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert len(first) == 10 and (3, 60)[rank] in first
