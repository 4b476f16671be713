"""Counter-based random bits: a pure function of a key and a counter, the same on every device, eager or compiled.

The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in
the wrapping int64 arithmetic that all of PyTorch's devices share. It is a bijection of 64 bits, so distinct counters
under one key never collide.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wrapped(number: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _wrapped(0x9E3779B97F4A7C15)
_MIX_1 = _wrapped(0xBF58476D1CE4E5B9)
_MIX_2 = _wrapped(0x94D049BB133111EB)
_LAST_SHIFT = 31


def _xor_shift_(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    # int64's >> copies the sign bit: the mask makes it the logical shift.
    shifted = torch.bitwise_right_shift(bits, shift, out=scratch).bitwise_and_((1 << (64 - shift)) - 1)
    return bits.bitwise_xor_(shifted)


def _mix_but_last_(bits: Tensor, scratch: Tensor) -> Tensor:
    _xor_shift_(bits, 30, scratch).mul_(_MIX_1)
    return _xor_shift_(bits, 27, scratch).mul_(_MIX_2)


def _mix_(bits: Tensor) -> Tensor:
    scratch = torch.empty_like(bits)
    return _xor_shift_(_mix_but_last_(bits, scratch), _LAST_SHIFT, scratch)


def random_bits(key: Tensor, counter: Tensor) -> Tensor:
    """Returns 64 random bits for each counter.

    Args:
        key: `[]` int64. Hashed first, so that nearby keys give unrelated streams.
        counter: `[…]` int64.

    Returns:
        `[…]` int64, every value equally likely.
    """
    return random_bits_(key, counter.clone())


def random_bits_(key: Tensor, counter: Tensor) -> Tensor:
    """As `random_bits`, in the place of `counter`."""
    return _mix_(counter.mul_(_GAMMA).add_(_mix_(key + _GAMMA)))


class RandomBlocks:
    """random_bits of consecutive counters, a block at a time, in the same memory; without their last step at first.

    That step leaves the highest DECIDED bits alone, and need not be made for all if few are wanted.

    Args:
        key: as in `random_bits`.
        size: the most counters of a block.
    """

    DECIDED = _LAST_SHIFT

    def __init__(self, key: Tensor, size: int) -> None:
        self._offset = _mix_(key + _GAMMA)
        self._steps = torch.arange(size, device=key.device).mul_(_GAMMA)
        self._bits, self._scratch = torch.empty_like(self._steps), torch.empty_like(self._steps)

    def unfinished(self, start: int, size: int) -> Tensor:
        """`[size]`, of the counters from `start` on: valid until the next call."""
        bits = torch.add(self._steps[:size], self._offset + _wrapped(start * _GAMMA), out=self._bits[:size])
        return _mix_but_last_(bits, self._scratch[:size])

    @staticmethod
    def finish(bits: Tensor) -> Tensor:
        """What random_bits would have returned, of some of them."""
        return _xor_shift_(bits.clone(), _LAST_SHIFT, torch.empty_like(bits))
