"""The oracle against PyTorch's own operators and published values."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_pfc import reference

from .inputs import IGNORE, random_batch, s1


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_margin_it_is_cross_entropy(reduction: str, normalize: bool) -> None:
    batch = s1()
    batch.labels[3] = IGNORE
    rows, centres = batch.embeddings, batch.weight
    if normalize:
        rows, centres = F.normalize(rows), F.normalize(centres)
    expected = F.cross_entropy(batch.scale * rows @ centres.T, batch.labels, reduction=reduction)
    loss = reference.partial_fc_loss(
        batch.embeddings, batch.weight, batch.labels, scale=batch.scale, reduction=reduction, normalize=normalize
    )
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "margin, loss, embeddings_grad, weight_grad",
    [
        (None, 10.292813336, 4.754272089, 7.140362216),
        (reference.cosface(0.35), 15.866523600, 4.773160049, 7.254128149),
        (reference.arcface(0.5), 17.181427167, 4.088378408, 6.388843029),
    ],
    ids=["none", "cosface", "arcface"],
)
def test_known_losses_and_gradients(
    margin: reference.Margin | None, loss: float, embeddings_grad: float, weight_grad: float
) -> None:
    batch = s1()
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    value = reference.partial_fc_loss(x, w, batch.labels, margin=margin, scale=batch.scale)
    norms = [g.norm() for g in torch.autograd.grad(value, (x, w))]
    expected = torch.tensor([loss, embeddings_grad, weight_grad], dtype=torch.float64)
    torch.testing.assert_close(torch.stack([value, *norms]).detach(), expected, rtol=1e-9, atol=0)


def test_sampled_loss_is_that_of_the_sampled_classes_alone() -> None:
    batch = random_batch(6, 9, 3, scale=4.0, seed=0)
    sampled = torch.zeros(9, dtype=torch.bool).index_fill(0, batch.labels, True)
    sampled[5] = True
    among = sampled.cumsum(0)[batch.labels] - 1
    torch.testing.assert_close(
        reference.partial_fc_loss(batch.embeddings, batch.weight, batch.labels, sampled=sampled),
        reference.partial_fc_loss(batch.embeddings, batch.weight[sampled], among),
    )


def test_all_rows_ignored_give_zero_and_zero_gradients() -> None:
    batch = s1()
    x, w = batch.embeddings.requires_grad_(), batch.weight.requires_grad_()
    loss = reference.partial_fc_loss(x, w, torch.full((8,), IGNORE))
    gradients = torch.autograd.grad(loss, (x, w))
    assert loss == 0 and all(not g.any() for g in gradients)


def test_the_two_numbers_make_the_loss() -> None:
    batch = s1()
    x = batch.scale * F.normalize(batch.embeddings)
    negative_lse, target = reference.negative_lse_and_target(x, batch.weight, batch.labels)
    loss = F.softplus(negative_lse - (target - batch.scale * 0.35)).mean()
    torch.testing.assert_close(loss, torch.tensor(15.866523600, dtype=torch.float64), rtol=1e-9, atol=0)


def test_margins_meet_their_plain_forms_where_no_angle_passes_pi() -> None:
    theta = torch.linspace(0.1, 0.7, 7, dtype=torch.float64)
    cosine, nothing = theta.cos(), torch.empty(0)
    for margin, expected in [
        (reference.cosface(0.4), cosine - 0.4),
        (reference.arcface(0.5), torch.cos(theta + 0.5)),
        (reference.sphereface(4), torch.where(theta < math.pi / 4, torch.cos(4 * theta), -torch.cos(4 * theta) - 2)),
        (reference.combined(0.9, 0.4, 0.15), torch.cos(0.9 * theta + 0.4) - 0.15),
        (reference.combined(1.0, 0.5, 0.1), torch.cos(theta + 0.5) - 0.1),
    ]:
        torch.testing.assert_close(margin(cosine, nothing, nothing), expected)


@pytest.mark.parametrize("num_classes, world_size", [(10, 1), (10, 3), (10, 4), (3, 4), (5, 4), (1, 3), (9, 4)])
def test_shards_cover_the_classes_in_order(num_classes: int, world_size: int) -> None:
    shards = reference.shards(num_classes, world_size)
    assert len(shards) == world_size
    assert [c for shard in shards for c in shard] == list(range(num_classes))
    assert all(len(shard) <= math.ceil(num_classes / world_size) for shard in shards)
