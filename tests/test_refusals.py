"""Bad input: the error names the rule and the value, on every rank, and the next step works."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_pfc

from .inputs import error_of, group_rank, make_head, my_rows, s1
from .ranks import run_ranks


def step_with_label(label: int, rank: int, options: dict[str, Any]) -> tuple[tuple[str, str], float]:
    """What this rank raises where `rank` gives a bad label, and the loss of the good batch that follows."""
    batch = s1()
    head = make_head(batch, margin=torch_pfc.CosFace(0.35), **options)
    counts = [8 // dist.get_world_size()] * dist.get_world_size()
    x, labels = my_rows(batch.embeddings, counts), my_rows(batch.labels, counts)
    bad = labels.clone()
    if group_rank() == rank:
        bad[-1] = label
    return error_of(lambda: head(x, bad)), float(head(x, labels).detach())


@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.99}, {"uneven_batches": True}], ids=str)
@pytest.mark.parametrize("label", [-1, 10, -101, 2**40])
@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 1), (4, 2)])
def test_a_label_that_is_no_class_raises_on_every_rank(
    label: int, world_size: int, rank: int, options: dict[str, Any]
) -> None:
    """A label of -1 trained the last class of rank 0, by truncating division."""
    for (kind, message), _ in run_ranks(world_size, step_with_label, label, rank, options):
        assert kind == "RuntimeError"
        assert "labels must lie in [0, 10) or equal ignore_index=-100" in message and str(label) in message


def test_a_good_batch_follows_a_bad_one() -> None:
    for _, loss in run_ranks(2, step_with_label, 10, 0, {}):
        assert loss == pytest.approx(15.866523600)


@pytest.mark.parametrize(
    "embeddings, labels, error, says",
    [
        (torch.ones(3, 5), torch.zeros(3).long(), ValueError, r"embeddings must be \[B, 4\], got \[3, 5\]"),
        (torch.ones(4), torch.zeros(4).long(), ValueError, r"embeddings must be \[B, 4\], got \[4\]"),
        (
            torch.ones(3, 4).long(),
            torch.zeros(3).long(),
            TypeError,
            "embeddings must be floating point, got torch.int64",
        ),
        (torch.ones(3, 4), torch.zeros(2).long(), ValueError, r"labels must be \[3\] or \[3, 1\].*got \[2\]"),
        (torch.ones(3, 4), torch.zeros(1, 3).long(), ValueError, r"labels must be \[3\] or \[3, 1\].*got \[1, 3\]"),
        (torch.ones(3, 4), torch.zeros(3, 2).long(), ValueError, r"labels must be \[3\] or \[3, 1\].*got \[3, 2\]"),
        (torch.ones(3, 4), torch.zeros(3), TypeError, "labels must be integers, got torch.float32"),
    ],
)
def test_shapes_and_dtypes(embeddings: torch.Tensor, labels: torch.Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        torch_pfc.PartialFC(4, 10)(embeddings, labels)


@pytest.mark.parametrize(
    "arguments, options, says",
    [
        ((0, 10), {}, "embedding_dim must be at least 1, got 0"),
        ((4, 0), {}, "num_classes must be at least 1, got 0"),
        ((4, 10), {"sample_rate": 1.5}, r"sample_rate must lie in \[0, 1\], got 1.5"),
        ((4, 10), {"sample_rate": -0.1}, r"sample_rate must lie in \[0, 1\], got -0.1"),
        ((4, 10), {"sample_rate": float("nan")}, r"sample_rate must lie in \[0, 1\], got nan"),
        ((4, 10), {"reduction": "average"}, "reduction must be 'mean', 'sum' or 'none', got 'average'"),
        ((4, 10), {"scale": 0.0}, "scale must be positive, got 0.0"),
    ],
    ids=str,
)
def test_options_out_of_range(arguments: tuple[int, int], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        torch_pfc.PartialFC(*arguments, **options)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: torch_pfc.ArcFace(-0.1), "-0.1"),
        (lambda: torch_pfc.ArcFace(4.0), "4.0"),
        (lambda: torch_pfc.SphereFace(0.5), "0.5"),
        (lambda: torch_pfc.CombinedMargin(0.5, 0.0, 0.0), "0.5"),
        (lambda: torch_pfc.CombinedMargin(1.0, -1.0, 0.0), "-1.0"),
    ],
)
def test_margins_out_of_range(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def groups_that_are_none() -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    other = dist.new_group([1, 3])
    errors = [
        error_of(lambda: torch_pfc.PartialFC(4, 10, group=mesh)),
        error_of(lambda: torch_pfc.PartialFC(4, 10, group="world")),  # type: ignore[arg-type]
    ]
    if dist.get_rank() in (0, 2):
        errors.append(error_of(lambda: torch_pfc.PartialFC(4, 10, group=other)))
    return errors


def test_groups_that_cannot_be_used() -> None:
    for rank, (two_dims, no_group, *not_member) in enumerate(run_ranks(4, groups_that_are_none)):
        assert two_dims[0] == "ValueError" and "1-D DeviceMesh" in two_dims[1] and "2 dimensions" in two_dims[1]
        assert no_group[0] == "TypeError" and "str" in no_group[1]
        assert [kind for kind, _ in not_member] == ([] if rank in (1, 3) else ["ValueError"])
