"""Another list of classes: rows and their optimizer state follow their new ids, new ones are drawn."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_pfc
from torch_pfc.checkpoint import _resize, resize

from .inputs import error_of, even, my_rows, random_batch
from .ranks import run_ranks

DIM, SEED = 3, 7


def trained(num_classes: int, sample_rate: float = 1.0) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    head = torch_pfc.PartialFC(DIM, num_classes, sample_rate=sample_rate)
    other = torch.nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": other.parameters()}, {"params": head.weight, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    other(torch.ones(2)).sum().backward()
    step(head, optimizer)
    return head, optimizer, other


def step(head: Any, optimizer: Any) -> Tensor:
    batch = random_batch(12, head.num_classes, DIM, scale=1.0, seed=1)
    counts = even(12, head.group.size)
    optimizer.zero_grad()
    loss: Tensor = head(my_rows(batch.embeddings, counts).float(), my_rows(batch.labels, counts))
    loss.backward()
    optimizer.step()
    return loss.detach()


def resize_trained(num_classes: int, new_num_classes: int, new_ids: Tensor | None, tile: int) -> tuple[Any, ...]:
    """The weight, momentum and variance of this rank before and after."""
    head, optimizer, other = trained(num_classes)
    old = head.weight
    before = old.detach().clone(), *(optimizer.state[old][key].clone() for key in ("exp_avg", "exp_avg_sq"))
    others_state = {key: value.clone() for key, value in optimizer.state[other.weight].items()}
    torch.manual_seed(SEED)
    with mock.patch.object(_resize, "TILE_ELEMENTS", tile):
        resize(head, new_num_classes, new_ids, optimizer=optimizer)
    state = optimizer.state[head.weight]
    assert head.weight is not old and head.weight.grad is None and head.weight.requires_grad
    assert optimizer.param_groups[1]["params"][0] is head.weight and old not in optimizer.state
    assert state["step"] == 1 and all(torch.equal(optimizer.state[other.weight][k], v) for k, v in others_state.items())
    after = head.weight.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    torch.manual_seed(SEED)
    fresh = torch_pfc.PartialFC(DIM, new_num_classes)
    held = (fresh.num_classes, fresh.class_start, fresh.num_local_classes, fresh.num_sampled)
    assert held == (head.num_classes, head.class_start, head.num_local_classes, head.num_sampled)
    loss = step(head, optimizer)
    return before, after, fresh.weight.detach(), loss


def check(
    world_size: int, num_classes: int, new_num_classes: int, new_ids: list[int] | None, tile: int = 1 << 20
) -> None:
    ids = None if new_ids is None else torch.tensor(new_ids)
    ranks = run_ranks(world_size, resize_trained, num_classes, new_num_classes, ids, tile)
    before, after = ([torch.cat(parts) for parts in zip(*(r[i] for r in ranks), strict=True)] for i in (0, 1))
    drawn = torch.cat([r[2] for r in ranks])
    expected = [drawn, torch.zeros_like(drawn), torch.zeros_like(drawn)]
    for old_id, new_id in enumerate(range(num_classes) if new_ids is None else new_ids):
        if new_id >= 0:
            for tensor, source in zip(expected, before, strict=True):
                tensor[new_id] = source[old_id]
    for found, right in zip(after, expected, strict=True):
        assert torch.equal(found, right)
    assert all(torch.equal(r[3], ranks[0][3]) and r[3].isfinite() for r in ranks)


@st.composite
def class_lists(draw: Any) -> tuple[int, int, list[int]]:
    num_classes, new_num_classes = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    places = draw(st.permutations(range(max(num_classes, new_num_classes))))
    return num_classes, new_num_classes, [place if place < new_num_classes else -1 for place in places[:num_classes]]


@settings(max_examples=40, deadline=None)
@given(class_lists(), st.sampled_from([1, 4, 2, 3]), st.sampled_from([1, 20, 1 << 20]))
def test_rows_and_state_follow_their_ids(lists: Any, world_size: int, tile: int) -> None:
    num_classes, new_num_classes, new_ids = lists
    check(world_size, num_classes, new_num_classes, new_ids, tile)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_classes, new_num_classes", [(5, 7), (1, 4), (7, 7)])
def test_without_ids_all_keep_theirs(world_size, num_classes, new_num_classes):
    check(world_size, num_classes, new_num_classes, None)


def new_rows() -> Tensor:
    torch.manual_seed(0)
    head = torch_pfc.PartialFC(DIM, 5)
    torch.manual_seed(SEED)
    resize(head, 3000, torch.tensor([2000, -1, 7, 0, 2999], dtype=torch.int32))
    return head.weight.detach()


def test_new_rows_do_not_depend_on_the_number_of_ranks():
    alone = new_rows()
    for world_size in (2, 3):
        assert torch.equal(torch.cat(run_ranks(world_size, new_rows)), alone)


def refused(case: str) -> tuple[tuple[str, str], bool]:
    head, optimizer, other = trained(5)
    before = head.weight, head.weight.detach().clone(), optimizer.state[head.weight]["exp_avg"].clone()
    rank = head.group.rank
    ids = torch.arange(5)
    arguments: dict[str, Any] = {
        "twice": ((7, torch.tensor([0, 6, 2, 6, -1])), {}),
        "too large": ((4, ids), {}),
        "negative": ((7, torch.tensor([0, 1, -2, 3, 4])), {}),
        "short": ((7, ids[:4]), {}),
        "float": ((7, ids.float()), {}),
        "fewer": ((4,), {}),
        "none": ((0,), {}),
        "differ": ((7, ids + rank), {}),
        "sizes differ": ((7 + rank, ids), {}),
        "states differ": ((7, ids), {"optimizer": optimizer if rank else None}),
        "on one rank": ((7, ids - 3 * rank), {}),
        "without the weight": ((7, ids), {"optimizer": torch.optim.SGD(other.parameters())}),
    }
    positional, keywords = arguments[case]
    error = error_of(lambda: resize(head, *positional, **keywords))
    same = before[0] is head.weight and head.num_classes == 5
    return error, same and all(
        torch.equal(*pair)
        for pair in zip(before[1:], (head.weight, optimizer.state[head.weight]["exp_avg"]), strict=True)
    )


REFUSALS = {
    "twice": ("ValueError", "new_ids must differ from each other, got [6] more than once"),
    "too large": ("ValueError", "new_ids must lie in [0, 4) or equal -1, got [4]"),
    "negative": ("ValueError", "new_ids must lie in [0, 7) or equal -1, got [-2]"),
    "short": ("ValueError", "one entry for each of 5 classes, got [4]"),
    "float": ("TypeError", "new_ids must be integers, got torch.float32"),
    "fewer": ("ValueError", "at least the 5 of the head unless new_ids says which stay, got 4"),
    "none": ("ValueError", "num_classes must be at least 1, got 0"),
    "differ": ("ValueError", "must be the same on every rank, got num_classes [7, 7]"),
    "sizes differ": ("ValueError", "must be the same on every rank, got num_classes [7, 8]"),
    "states differ": ("ValueError", "state [[], ['exp_avg', 'exp_avg_sq']]"),
    "on one rank": ("ValueError", "new_ids must lie in [0, 7) or equal -1, got [-3, -2]"),
    "without the weight": ("ValueError", "must hold head.weight to move its state"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_raises_on_every_rank_and_changes_nothing(case):
    kind, words = REFUSALS[case]
    for rank, ((error, message), unchanged) in enumerate(run_ranks(2, refused, case)):
        assert words in message and unchanged
        assert error == ("RuntimeError" if case == "on one rank" and rank == 0 else kind)


def test_a_frozen_weight_stays_frozen_and_sampling_follows():
    head = torch_pfc.PartialFC(DIM, 10, sample_rate=0.5)
    head.weight.requires_grad_(False)
    resize(head, 20)
    assert not head.weight.requires_grad and head.num_sampled == 10 and head.weight.shape == (20, DIM)


def test_compiled_callers_go_on():
    head, optimizer, _ = trained(5, sample_rate=0.5)
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    x, key = torch.randn(4, DIM), torch.tensor(3)
    for num_classes, label in itertools.product([5, 9], [0, 4]):
        if head.num_classes != num_classes:
            resize(head, num_classes, optimizer=optimizer)
        labels = torch.tensor([label, num_classes - 1, 1, 2])
        assert torch.equal(compiled(x, labels, key=key), head(x, labels, key=key))


@pytest.mark.cuda
def test_on_a_device():
    torch.manual_seed(0)
    head = torch_pfc.PartialFC(DIM, 5, device="cuda")
    before = head.weight.detach().clone()
    resize(head, 9, torch.tensor([8, -1, 3, 0, 1]))
    assert head.weight.is_cuda and torch.equal(head.weight[[8, 3, 0, 1]], before[[0, 2, 3, 4]])
