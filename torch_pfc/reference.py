"""Partial FC as a text-book page: dense, one process, float64, plain autograd. The oracle of the tests.

The loss of a row with embedding x and label y, over the classes P that take part (y is one of them)::

    cos_j = <x, w_j> / (|x| |w_j|)        z_y = s psi(cos_y)        z_j = s cos_j  (j != y)
    loss  = log sum_{j in P} exp(z_j) - z_y

Source: An et al., "Partial FC: Training 10 Million Identities on a Single Machine" (arXiv 2010.05222) and "Killing
Two Birds with One Stone: Efficient and Robust Training of Face Recognition CNNs by Partial FC" (arXiv 2203.15565).

Letters: `N` rows, `D` embedding width, `C` classes, `K` classes of one shard, `W` ranks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit

Margin = Callable[[Tensor, Tensor, Tensor], Tensor]


def partial_fc_loss(
    embeddings: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    margin: Margin | None = None,
    scale: float | Tensor = 64.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    sampled: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """Margin softmax loss over the sampled classes.

    Args:
        embeddings: `[N, D]`, any float dtype; the maths is float64.
        weight: `[C, D]` class centres, any float dtype.
        labels: `[N]` or `[N, 1]` integer class ids, or `ignore_index`.
        margin: `margin(cosine [n], embeddings [n, D], labels [n]) -> [n]` on the `n` rows that are not ignored;
            None for no margin.
        scale: the factor `s` of the logits.
        ignore_index: the label of rows that count for nothing.
        reduction: `"mean"` over the rows that are not ignored (0 if there are none), `"sum"`, or `"none"`.
        sampled: `[C]` bool, the classes that take part; None for all.
        normalize: cosines if True, plain dot products if False.

    Returns:
        float64, `[]`, or `[N]` for `"none"` (0 for ignored rows).
    """
    labels = labels.reshape(-1).long()
    kept = labels != ignore_index
    x, w, y = embeddings.double()[kept], weight.double(), labels[kept]
    cosine = unit(x) @ unit(w).T if normalize else x @ w.T
    target = cosine.gather(1, y[:, None]).squeeze(1)
    margined = target if margin is None else margin(target, x, y)
    logits = (scale * cosine).scatter(1, y[:, None], scale * margined[:, None])
    if sampled is not None:
        logits = logits.masked_fill(~sampled, -math.inf)
    loss = logits.logsumexp(1) - scale * margined
    if reduction == "none":
        return torch.zeros(len(labels), dtype=loss.dtype).masked_scatter(kept, loss)
    return loss.sum() / max(len(y), 1) if reduction == "mean" else loss.sum()


def negative_lse_and_target(
    embeddings: Tensor, weight: Tensor, labels: Tensor, *, sampled: Tensor | None = None, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """The two numbers per row that the loss is made of: log-sum-exp of the other classes, and the target's logit.

    Args:
        embeddings: `[N, D]`, already scaled (`s x / |x|`).
        weight: `[C, D]` class centres; their rows are normalised here if `normalize`.
        labels: `[N]` class ids; a negative one means that no class is the row's target, whose logit is then 0.
        sampled: `[C]` bool, the classes that take part; None for all.

    Returns:
        `negative_lse [N]`, `target_logit [N]`, float64.
    """
    logits = embeddings.double() @ (unit(weight.double()) if normalize else weight.double()).T
    is_target = labels[:, None] == torch.arange(len(weight))
    others = ~is_target if sampled is None else ~is_target & sampled
    return logits.masked_fill(~others, -math.inf).logsumexp(1), (logits * is_target).sum(1)


def cosface(m: float) -> Margin:
    """`cos(theta) - m` (Wang et al. 2018, arXiv 1801.09414)."""
    return lambda cosine, embeddings, labels: cosine - m


def arcface(m: float, straight_through: bool = False) -> Margin:
    """`cos(theta + m)`, and `cos(theta) - m sin(m)` past `theta + m > pi` (Deng et al. 2019, arXiv 1801.07698).

    With `straight_through` the value is the same and the derivative by the cosine is 1.
    """

    def psi(cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        theta = cosine.acos()
        value = torch.where(theta + m > math.pi, cosine - m * math.sin(m), (theta + m).cos())
        return cosine + (value - cosine).detach() if straight_through else value

    return psi


def sphereface(m: float) -> Margin:
    """`(-1)^k cos(m theta) - 2k`, `k = floor(m theta / pi)` (Liu et al. 2017, arXiv 1704.08063), for real `m`."""
    return lambda cosine, embeddings, labels: _falling_cosine(m * cosine.acos())


def combined(m1: float, m2: float, m3: float) -> Margin:
    """`cos(m1 theta + m2) - m3` (arXiv 1801.07698), past pi as ArcFace if `m1 == 1`, else as SphereFace."""

    def psi(cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        if m1 == 1:
            return arcface(m2)(cosine, embeddings, labels) - m3
        return _falling_cosine(m1 * cosine.acos() + m2) - m3

    return psi


def _falling_cosine(angle: Tensor) -> Tensor:
    k = (angle / math.pi).floor()
    return torch.where(k % 2 == 0, 1.0, -1.0) * angle.cos() - 2 * k


def shards(num_classes: int, world_size: int) -> list[range]:
    """The classes of every rank: `torch.chunk`'s split, with empty shards for the ranks it leaves out."""
    chunks = [range(int(c[0]), int(c[-1]) + 1) for c in torch.arange(num_classes).chunk(world_size)]
    return chunks + [range(num_classes, num_classes)] * (world_size - len(chunks))


def sampled_classes(labels: Tensor, priority: Tensor, shard: range, num_sampled: int) -> list[int]:
    """The classes of one shard that take part: every positive, then negatives by rising priority up to the budget.

    Args:
        labels: `[N]` global class ids; those outside the shard do not matter here.
        priority: `[K]`, what the draw orders the shard's classes by.
        shard: the global ids of the shard's classes.
        num_sampled: the budget `int(sample_rate * K)`; exceeded only by the positives.

    Returns:
        Sorted global class ids.
    """
    positives = {int(label) for label in labels if int(label) in shard}
    drawn = [shard[int(i)] for i in priority.argsort() if shard[int(i)] not in positives]
    return sorted([*positives, *drawn[: max(num_sampled - len(positives), 0)]])
