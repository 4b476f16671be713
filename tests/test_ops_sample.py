"""pfc::sample: which classes of a shard take part, a pure function of labels, key and global class ids."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators
from torch_pfc import reference
from torch_pfc.ops import sample as sample_file
from torch_pfc.ops._hash import random_bits
from torch_pfc.plan._kernels import cuda_kernels

from .inputs import IGNORE

MASK = (1 << 64) - 1


def sample(labels: Tensor, key: int, start: int, size: int, num_sampled: int) -> tuple[Tensor, Tensor]:
    return torch.ops.pfc.sample(labels, torch.tensor(key), start, size, num_sampled, IGNORE)


def members(index: Tensor, size: int) -> list[int]:
    """The local ids in the set: padding lies past the shard's end."""
    return index[index < size].tolist()


def mix(bits: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def priorities(key: int, classes: range) -> Tensor:
    """What the draw orders the classes by: signed 64 bits, the smallest first."""
    gamma = 0x9E3779B97F4A7C15
    bits = [mix((c * gamma + mix((key + gamma) & MASK)) & MASK) for c in classes]
    return torch.tensor([b - (1 << 64) if b >> 63 else b for b in bits], dtype=torch.int64)


@st.composite
def draws(draw: st.DrawFn) -> tuple[Tensor, int, range, int]:
    """Labels of the whole group, a key, a shard, its budget."""
    num_classes = draw(st.integers(1, 40))
    start = draw(st.integers(0, num_classes))
    shard = range(start, draw(st.integers(start, num_classes)))
    label = st.integers(0, num_classes - 1) | st.just(IGNORE)
    labels = torch.tensor(draw(st.lists(label, min_size=1, max_size=12)))
    key = draw(st.integers(-(1 << 63), (1 << 63) - 1))
    return labels, key, shard, draw(st.integers(0, len(shard)))


@given(draws())
def test_the_set_is_the_positives_then_the_lowest_priorities(case: tuple[Tensor, int, range, int]) -> None:
    labels, key, shard, num_sampled = case
    index, _ = sample(labels, key, shard.start, len(shard), num_sampled)
    expected = reference.sampled_classes(labels, priorities(key, shard), shard, num_sampled)
    assert [shard.start + i for i in members(index, len(shard))] == expected


@given(draws())
def test_index_is_sorted_unique_of_static_size_and_padded_past_the_shard(case: tuple[Tensor, int, range, int]) -> None:
    labels, key, shard, num_sampled = case
    size = len(shard)
    index, _ = sample(labels, key, shard.start, size, num_sampled)
    assert index.dtype == torch.int64
    assert len(index) == min(max(num_sampled, min(len(labels), size)), size)
    assert (index.diff() > 0).all() and (index >= 0).all() and (index < 2 * size).all()
    rows = (index % max(size, 1)).tolist()
    assert len(set(rows)) == len(rows), "a padding entry names a row that is in the set, or twice"


@given(draws())
def test_target_is_where_the_index_holds_the_label(case: tuple[Tensor, int, range, int]) -> None:
    labels, key, shard, num_sampled = case
    index, target = sample(labels, key, shard.start, len(shard), num_sampled)
    assert target.dtype == torch.int64 and target.shape == labels.shape
    for label, position in zip(labels.tolist(), target.tolist(), strict=True):
        if label in shard:
            assert index[position] == label - shard.start
        else:
            assert position == -1


@given(draws(), st.integers(0, 5))
def test_a_key_gives_one_set_whatever_the_rows_order_or_number(case: tuple[Tensor, int, range, int], more: int) -> None:
    labels, key, shard, num_sampled = case
    index, _ = sample(labels, key, shard.start, len(shard), num_sampled)
    again, _ = sample(labels, key, shard.start, len(shard), num_sampled)
    longer, _ = sample(torch.cat([labels.flip(0), labels[:1].repeat(more)]), key, shard.start, len(shard), num_sampled)
    assert torch.equal(index, again)
    assert members(longer, len(shard)) == members(index, len(shard))


def test_inputs_are_left_alone() -> None:
    labels, key = torch.tensor([3, IGNORE, 7]), torch.tensor(5)
    torch.ops.pfc.sample(labels, key, 0, 10, 4, IGNORE)
    assert labels.tolist() == [3, IGNORE, 7] and key.item() == 5


def test_ignore_index_that_is_a_class_id_is_no_positive() -> None:
    index, target = torch.ops.pfc.sample(torch.tensor([2, 1, 2]), torch.tensor(0), 0, 5, 0, 2)
    assert members(index, 5) == [1] and target.tolist() == [-1, 0, -1]


def test_keys_differ_and_so_do_their_sets() -> None:
    labels = torch.tensor([4])
    sets = {tuple(members(sample(labels, key, 0, 100, 20)[0], 100)) for key in range(50)}
    assert len(sets) == 50


def test_shards_do_not_mirror_one_another() -> None:
    """With a draw by local id two shards would pick the same rows under one key."""
    nothing = torch.tensor([IGNORE])
    shards = [members(sample(nothing, 7, start, 100, 20)[0], 100) for start in (0, 100, 200, 300)]
    assert all(a != b for i, a in enumerate(shards) for b in shards[i + 1 :])


def test_every_class_is_drawn_equally_often() -> None:
    """Chi-square over 2000 nearby keys: 99 degrees of freedom, sampling without replacement shrinks it by 0.8."""
    counts = torch.zeros(100)
    for key in range(2000):
        index, _ = sample(torch.tensor([IGNORE]), key, 1000, 100, 20)
        counts[index] += 1
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert 45 < chi_square < 125  # mean 80, standard deviation about 11


def test_pairs_of_classes_are_drawn_independently() -> None:
    """Neighbours come together as often as any two of 100 do when 20 are drawn: 20 * 19 / (100 * 99) of the time."""
    together = 0
    for key in range(2000):
        index, _ = sample(torch.tensor([IGNORE]), key, 0, 100, 20)
        together += int((index.diff() == 1).sum())
    assert together / 2000 == pytest.approx(99 * 20 * 19 / (100 * 99), abs=0.15)


def plainly_drawn(labels: Tensor, key: int, start: int, size: int, num_sampled: int) -> Tensor:
    """`index` by a sort of all priorities: positives, the lowest others up to the budget, then padding."""
    priority = random_bits(torch.tensor(key), torch.arange(start, start + size))
    is_positive = torch.isin(torch.arange(start, start + size), labels)
    order = torch.cat([is_positive.nonzero()[:, 0], priority.masked_fill(is_positive, 2**63 - 1).argsort()])
    num_entries = min(max(num_sampled, min(len(labels), size)), size)
    num_members = max(num_sampled, int(is_positive.sum()))
    chosen = order[:num_entries]
    return (chosen + size * (torch.arange(num_entries) >= num_members)).sort().values


@st.composite
def large_draws(draw: st.DrawFn) -> tuple[Tensor, int, int, int, int]:
    """Labels in clusters, or anywhere, of a shard of up to thousands of classes and the ones beside it."""
    size, start = draw(st.integers(1, 5000)), draw(st.integers(0, 10_000) | st.just(1 << 62))
    num_rows, width = draw(st.integers(1, 300)), draw(st.sampled_from([3, 100, 2 * size + 1]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    first = start + draw(st.integers(-50, size))
    labels = first + torch.randint(width, (num_rows,), generator=seed)
    labels[torch.rand(num_rows, generator=seed) < 0.2] = IGNORE
    return labels, draw(st.integers(-(1 << 63), (1 << 63) - 1)), start, size, draw(st.integers(0, size))


@given(large_draws(), st.sampled_from([1, 64, 999, 1 << 17]))
def test_a_draw_block_by_block_is_that_of_all_at_once(case: tuple[Tensor, int, int, int, int], block: int) -> None:
    """And so is an accelerator's, which has no blocks."""
    labels, key, start, size, num_sampled = case
    block = max(block, size // 50)
    expected = plainly_drawn(*case)
    with mock.patch.object(sample_file, "_BLOCK", block):
        index, target = sample(*case)
    assert torch.equal(index, expected)
    with cuda_kernels():
        whole = sample_file.sample._init_fn(labels, torch.tensor(key), start, size, num_sampled, IGNORE)
    assert torch.equal(whole[0], index) and torch.equal(whole[1], target)


@pytest.mark.parametrize("factor", [0.0, 0.3])
@pytest.mark.parametrize("num_sampled", [100, 999, 1000])
def test_a_bound_that_was_too_low_is_tried_again_without(factor: float, num_sampled: int) -> None:
    """Which happens once in 10¹⁵ draws, or whenever one looks for a third as many classes."""
    labels = torch.arange(2990, 3010)
    lowest = sample_file._lowest
    parts: list[float] = []

    def low(
        positives: Tensor, key: Tensor, class_start: int, num_local_classes: int, part: float
    ) -> tuple[Tensor, Tensor]:
        parts.append(part)
        part *= factor if len(parts) == 1 else 1
        return lowest(positives, key, class_start, num_local_classes, part)

    with mock.patch.object(sample_file, "_lowest", low), mock.patch.object(sample_file, "_BLOCK", 64):
        index, _ = sample(labels, 5, 3000, 1000, num_sampled)
    assert torch.equal(index, plainly_drawn(labels, 5, 3000, 1000, num_sampled))
    assert len(parts) == 2 and parts[1] == 1


def test_few_classes_are_kept_of_a_large_shard() -> None:
    """The CPU sorts little more than what it draws."""
    kept = []
    lowest = sample_file._lowest

    def watched(*arguments):
        found = lowest(*arguments)
        kept.append(len(found[0]))
        return found

    with mock.patch.object(sample_file, "_lowest", watched):
        for key in range(5):
            sample(torch.tensor([IGNORE]), key, 0, 300_000, 3000)
    assert len(kept) == 5 and min(kept) >= 3000 and max(kept) < 4500


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("size, num_sampled", [(20, 20), (20, 4), (20, 0), (3, 0), (0, 0)])
def test_opcheck(num_rows: int, size: int, num_sampled: int) -> None:
    """PB-32: rates 1, 0.2 and 0, a shard smaller than the batch, an empty shard."""
    labels = 3 * torch.arange(num_rows)
    torch.library.opcheck(torch.ops.pfc.sample.default, (labels, torch.tensor(1), 0, size, num_sampled, IGNORE))
