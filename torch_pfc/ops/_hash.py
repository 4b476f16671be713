"""Counter-based random bits: a pure function of a key and a counter, the same on every device, eager or compiled.

The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in
the wrapping int64 arithmetic that all of PyTorch's devices share. It is a bijection of 64 bits, so distinct counters
under one key never collide.
"""

from __future__ import annotations

from torch import Tensor


def _signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(bits: Tensor, shift: int) -> Tensor:
    # int64's >> copies the sign bit: the mask makes it the logical shift.
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mix_(bits: Tensor) -> Tensor:
    _xor_shift_(bits, 30).mul_(_MIX_1)
    _xor_shift_(bits, 27).mul_(_MIX_2)
    return _xor_shift_(bits, 31)


def random_bits(key: Tensor, counter: Tensor) -> Tensor:
    """Returns 64 random bits for each counter.

    Args:
        key: `[]` int64. Hashed first, so that nearby keys give unrelated streams.
        counter: `[…]` int64.

    Returns:
        `[…]` int64, every value equally likely.
    """
    return _mix_((counter * _GAMMA).add_(_mix_(key + _GAMMA)))
