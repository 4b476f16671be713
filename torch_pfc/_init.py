"""Initial class centres: a function of the seed and the class id, whatever the number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops._hash import random_bits

# As in InsightFace. Centres are used at unit length, so this sets how far a step of given size turns them.
_STD = 0.01
# Classes that share one seed: values are drawn in whole blocks, so that they do not depend on where shards end.
_BLOCK = 1024


@torch.no_grad()
def draw_centres_(weight: Tensor, class_start: int) -> None:
    """Fills `weight` `[K, D]`, the centres of `class_start` and the classes after it, from a normal distribution.

    The key comes from torch's default CPU generator. A weight on the meta device only takes it.
    """
    key = torch.randint(2**62, ())
    if weight.is_meta:
        return
    stop = class_start + weight.shape[0]
    first_block = class_start // _BLOCK
    seeds = random_bits(key, torch.arange(first_block, -(-stop // _BLOCK))).tolist()
    generator = torch.Generator(weight.device)
    for block, seed in enumerate(seeds, start=first_block):
        values = torch.empty(_BLOCK, weight.shape[1], device=weight.device)
        values.normal_(std=_STD, generator=generator.manual_seed(seed))
        start = block * _BLOCK
        low, high = max(start, class_start), min(start + _BLOCK, stop)
        weight[low - class_start : high - class_start] = values[low - start : high - start]
