"""Counter-based random bits: a pure function of a key and a counter, the same on every device, eager or compiled.

The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in
the wrapping int64 arithmetic that all of PyTorch's devices share. It is a bijection of 64 bits, so distinct counters
under one key never collide.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    # int64's >> copies the sign bit: the mask makes it the logical shift.
    shifted = torch.bitwise_right_shift(bits, shift, out=scratch).bitwise_and_((1 << (64 - shift)) - 1)
    return bits.bitwise_xor_(shifted)


def _mix_(bits: Tensor) -> Tensor:
    scratch = torch.empty_like(bits)
    _xor_shift_(bits, 30, scratch).mul_(_MIX_1)
    _xor_shift_(bits, 27, scratch).mul_(_MIX_2)
    return _xor_shift_(bits, 31, scratch)


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
