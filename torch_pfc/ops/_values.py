"""Questions to values, which a CPU answers at no cost, and an accelerator only with a sync: it is not asked.

The planner, whose tensors have no values, answers in their place.
"""

from __future__ import annotations

from torch import Tensor


def is_known(condition: Tensor) -> bool:
    """Whether all of a condition holds. Of an accelerator's nothing is known."""
    return condition.device.type == "cpu" and bool(condition.all())


def are_between(values: Tensor, low: float, high: float) -> bool:
    """Whether all values are known to be, bounds excluded."""
    if values.device.type != "cpu" or values.numel() == 0:
        return values.device.type == "cpu"
    smallest, largest = values.aminmax()
    return low < smallest.item() and largest.item() < high  # NaN is not


def listed(values: Tensor) -> list[int] | None:
    """The integers `[N]`, if they are known."""
    return values.tolist() if values.device.type == "cpu" else None
