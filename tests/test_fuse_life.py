"""What becomes of a fused head: frozen, checkpointed, gone back over, copied, clipped, unfused; and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_pfc
from torch_pfc.optim import SparseAdamW, SparseSGD

from .inputs import random_batch
from .test_fuse import ADAMW, MOMENTUM, Training, assert_same


def test_none_gives_gradients_again() -> None:
    head_options = {"sample_rate": 0.4, "sparse_grad": True}
    run, twin = (Training(fused, SparseAdamW, ADAMW, 40, torch.float64, **head_options) for fused in (True, False))
    for number in range(4):
        if number == 2:
            run.head.fuse(None)
        run.step(number)
        twin.step(number)
    assert_same(run.values(), twin.values())


def test_what_is_not_trained_is_not_updated() -> None:
    run = Training(True, SparseAdamW, ADAMW, 40, torch.float32)
    before = run.values()
    with torch.no_grad():
        run.head(torch.randn(4, 3), torch.arange(4))
    run.head(torch.randn(4, 3, requires_grad=True), torch.arange(4))  # a loss that is only looked at
    run.head.weight.requires_grad_(False)
    run.step(0)
    assert_same(run.values(), before)


def test_activation_checkpointing_steps_once() -> None:
    found, expected = (Training(True, SparseAdamW, ADAMW, 40, torch.float64, sample_rate=0.4) for _ in range(2))
    batch = random_batch(4, 40, 3, scale=8.0, seed=1)
    for use_reentrant in (True, False):
        torch.manual_seed(0)
        expected.head(batch.embeddings.clone().requires_grad_(), batch.labels).backward()
        torch.manual_seed(0)
        x = batch.embeddings.clone().requires_grad_()
        checkpoint(found.head, x, batch.labels, use_reentrant=use_reentrant).backward()
        assert_same(found.values(), expected.values())


def test_a_second_backward_is_refused_and_steps_no_more() -> None:
    """Through one graph, or through that of a forward from before the step: its weight is no longer there."""
    run = Training(True, SparseAdamW, ADAMW, 40, torch.float32)
    x = torch.randn(4, 3, requires_grad=True)
    first, second = (run.head(x, torch.arange(4)) for _ in range(2))
    first.backward(retain_graph=True)
    after = run.values()
    for loss in (first, second):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert_same(run.values(), after)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_copy_is_not_fused(duplicate: Any) -> None:
    """It would step with a state, and parameters, that nobody else sees."""
    run = Training(True, SparseSGD, MOMENTUM, 40, torch.float32)
    other, before = duplicate(run.head), run.values()
    assert torch.equal(other.weight, run.head.weight)
    other(torch.randn(4, 3, requires_grad=True), torch.arange(4)).backward()
    assert other.weight.grad is not None
    assert_same(run.values(), before)
    run.step(0)
    assert not torch.equal(run.head.weight, before[0]) and torch.equal(other.weight, before[0])


def test_a_fused_weight_is_in_no_clipped_norm() -> None:
    run, backbone = Training(True, SparseSGD, MOMENTUM, 40, torch.float32), nn.Linear(3, 3)
    run.head(backbone(torch.randn(4, 3)), torch.arange(4)).backward()
    norm = torch_pfc.clip_grad_norm_([*backbone.parameters(), run.head.weight], 1.0)
    assert norm > 0 and run.head.weight.grad is None
    assert torch_pfc.clip_grad_norm_([run.head.weight], 1.0) == 0


def test_what_cannot_be_fused_is_named() -> None:
    head = torch_pfc.PartialFC(3, 10)
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (torch.optim.SGD([head.weight]), None, TypeError, "torch_pfc.optim's, got a SGD"),
        (SparseSGD([nn.Parameter(torch.zeros(10, 3))]), None, ValueError, r"one of \[10, 3\] is none of its own"),
        (SparseSGD([head.weight], momentum=0.9, dampening=0.5), None, ValueError, "dampening must be 0 .* got 0.5"),
        (SparseSGD([head.weight]), torch.amp.GradScaler("cpu"), TypeError, "torch_pfc.GradScaler, got a GradScaler"),
    ]
    for optimizer, scaler, error, says in refused:
        with pytest.raises(error, match=says):
            head.fuse(optimizer, scaler)
        assert head._fused is None
    head.fuse(SparseSGD([head.weight]))
    with pytest.raises(RuntimeError, match=r"embeddings must require grad .* head.fuse\(None\)"):
        head(torch.randn(4, 3), torch.arange(4))
    head.weight = nn.Parameter(torch.zeros(10, 3))
    with pytest.raises(ValueError, match="none of its own"):
        head(torch.randn(4, 3, requires_grad=True), torch.arange(4))
