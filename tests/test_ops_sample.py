"""pfc::sample: which classes of a shard take part, a pure function of labels, key and global class ids."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators
from torch_pfc import reference

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


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("size, num_sampled", [(20, 20), (20, 4), (20, 0), (3, 0), (0, 0)])
def test_opcheck(num_rows: int, size: int, num_sampled: int) -> None:
    """PB-32: rates 1, 0.2 and 0, a shard smaller than the batch, an empty shard."""
    labels = 3 * torch.arange(num_rows)
    torch.library.opcheck(torch.ops.pfc.sample.default, (labels, torch.tensor(1), 0, size, num_sampled, IGNORE))
