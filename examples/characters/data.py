"""Who is trained on, who is tested on, and the batches in between."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .glyphs import Glyphs

SPLIT_SEED = 20_240  # fixed, so that `--seed` never moves a test character into training
NUM_TEST, NUM_VALIDATE = 2000, 1000  # of about 30,000; smaller sets keep the proportion
FULL = 30_000

# Reach of the augmentation, each way. A WARP of 0.2 did worse on validation characters in three training typefaces,
# and better on an unseen brush typeface as long as no brush typeface was trained on.
WEIGHT = 0.6  # of the way to one pixel heavier or lighter strokes
WARP = 0.12  # slant and stretch, as a part of the glyph's size
SHIFT = 0.06  # of half the image: 1.2 pixels
WOBBLE = 0.08  # of half the image, at 5 x 5 points


@dataclasses.dataclass(frozen=True)
class Split:
    """Identities [n] of each part, ascending; no identity is in two."""

    train: NDArray[np.int32]
    validate: NDArray[np.int32]
    test: NDArray[np.int32]


def split(num_identities: int) -> Split:
    """Shuffles the identities by a fixed seed and cuts them."""
    order = np.random.default_rng(SPLIT_SEED).permutation(num_identities).astype(np.int32)
    share = min(1.0, num_identities / FULL)
    num_test, num_validate = int(NUM_TEST * share), int(NUM_VALIDATE * share)
    return Split(
        train=np.sort(order[num_test + num_validate :]),
        validate=np.sort(order[num_test : num_test + num_validate]),
        test=np.sort(order[:num_test]),
    )


def rows_of(glyphs: Glyphs, identities: NDArray[np.int32], designs: list[int]) -> NDArray[np.int64]:
    """The rows [n] of the images that show one of these identities in one of these designs."""
    return np.flatnonzero(np.isin(glyphs.identity, identities) & np.isin(glyphs.design, np.array(designs)))


def batches(
    glyphs: Glyphs,
    identities: NDArray[np.int32],
    designs: list[int],
    size: int,
    seed: tuple[int, ...],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches: images uint8 [size, 1, 40, 40], labels int64 [size].

    Each pass over the glyphs is a new shuffle. A label is the position in `identities`. Ranks give
    different `seed`s, and so draw differently from the same glyphs.
    """
    rows = rows_of(glyphs, identities, designs)
    labels = np.searchsorted(identities, glyphs.identity[rows])
    random = np.random.default_rng(seed)
    order = np.empty(0, dtype=np.int64)
    while True:
        while len(order) < size:
            order = np.concatenate([order, random.permutation(len(rows))])
        now, order = order[:size], order[size:]
        images = torch.from_numpy(glyphs.images[rows[now]])
        yield images[:, None], torch.from_numpy(labels[now])


def augment(images: Tensor) -> Tensor:
    """Random ways of writing the same glyph: slant, size, place, wobble and stroke weight.

    Args:
        images: float [B, 1, 40, 40] in 0..1.

    Returns:
        float [B, 1, 40, 40].
    """
    num = len(images)

    def uniform(*shape: int, reach: float) -> Tensor:
        return (2 * torch.rand(*shape, device=images.device) - 1) * reach

    # Erosion is dilation of the negative; each row gets one of the two, as pooling is what costs here.
    half = num // 2
    heavier = F.max_pool2d(images[:half], 3, stride=1, padding=1)
    lighter = -F.max_pool2d(-images[half:], 3, stride=1, padding=1)
    amount = WEIGHT * torch.rand(num, 1, 1, 1, device=images.device)
    images = images.lerp(torch.cat([heavier, lighter]), amount)
    theta = torch.eye(2, 3, device=images.device) + torch.cat(
        [uniform(num, 2, 2, reach=WARP), uniform(num, 2, 1, reach=SHIFT)], dim=2
    )
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    wobble = F.interpolate(uniform(num, 2, 5, 5, reach=WOBBLE), images.shape[2:], mode="bilinear", align_corners=True)
    return F.grid_sample(images, grid + wobble.permute(0, 2, 3, 1), align_corners=False)
