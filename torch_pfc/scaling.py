"""What a sharded head changes about scaling gradients: the norm they are clipped by, and the verdict on overflow.

Both are one number for the whole group, so that every rank does the same to its part of the model.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import GeneratorType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from . import _shards
from .ops import _group
from .ops._group import Group


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that their norm over all shards is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` takes a rank's shard for the whole head, so that ranks would scale differently, and
    takes neither sparse gradients nor DTensors beside tensors. Here every entry of the model counts once: a head's
    shards over its group, a DTensor's over its mesh, any other gradient as the replica that it is. For dense float32
    tensors alone the two are the same to the bit.

    A collective: every rank passes the same parameters in the same order, those without a gradient there included. One
    all-gather of a number per parameter for every group, or dimension of a mesh, that parameters are split over.

    Args:
        parameters: whose `grad` is scaled: dense or sparse COO, floating point. One without takes no part.
        max_norm: what the norm is brought down to.
        norm_type: p of the p-norm over all entries; `inf` for the largest absolute value.
        error_if_nonfinite: raise where the norm is inf or nan, instead of scaling by it. Waits for the device.
        foreach: False for one kernel a gradient in place of torch's foreach kernels.

    Returns:
        `[]` the norm before clipping, the same on every rank: float32, or float64 if a gradient is.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is inf or nan: on every rank.
    """
    is_generator = isinstance(parameters, GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if is_generator and not parameters:
        warnings.warn("`parameters` is an empty generator: no gradient is clipped", stacklevel=3)

    norm = _total_norm(parameters, float(norm_type), foreach)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradients' norm of order {float(norm_type)} must be finite, got {norm.item()}; "
            "error_if_nonfinite=False scales by it all the same"
        )
    # torch's rule and constant. To multiply by 1 is cheaper than to ask the device whether to.
    coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    _scale_([_entries(parameter.grad) for parameter in parameters if parameter.grad is not None], coefficient, foreach)
    return norm


def _total_norm(parameters: Sequence[Tensor], p: float, foreach: bool | None) -> Tensor:
    """`[]`: the norm of the norms of all gradients, each taken over all ranks that hold a part of it."""
    split = [(parameter, _split_over(parameter)) for parameter in parameters]
    # A rank without a gradient for its part takes part in the collective all the same.
    split = [(parameter, groups) for parameter, groups in split if groups or parameter.grad is not None]
    if not split:
        return torch.tensor(0.0)
    norms = _norms([_final_entries(parameter, p) for parameter, _ in split], p, foreach)
    parts: dict[tuple[Group, ...], list[Tensor]] = defaultdict(list)
    for (_, groups), norm in zip(split, norms, strict=True):
        parts[groups].append(norm)
    whole = [_over_ranks(_stack(alike), groups, p) for groups, alike in parts.items()]
    return torch.linalg.vector_norm(torch.cat([part.to(norms[0].device) for part in whole]), p)


def _split_over(parameter: Tensor) -> tuple[Group, ...]:
    """The groups of which each rank holds other entries: a head's, and those of a DTensor's sharded dimensions."""
    group = _shards.group_of(parameter)
    groups = [*([group] if group else []), *_group.sharded_over(parameter)]
    return tuple(group for group in groups if group.size > 1)


def _final_entries(parameter: Tensor, p: float) -> Tensor:
    """This rank's entries of the whole gradient, added up; where there are none, one that changes no norm."""
    grad = parameter.grad
    if grad is not None:
        if hasattr(grad, "redistribute"):  # a DTensor may hold partial sums
            grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        entries = _entries(grad.coalesce() if grad.is_sparse else grad)
        if entries.numel():
            return entries
    return _entries(parameter).new_full((1,), 0.0 if p >= 0 else math.inf)


def _entries(tensor: Tensor) -> Tensor:
    """What holds this rank's entries: the values of a sparse tensor, a DTensor's local one. An alias."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local._values() if local.is_sparse else local


def _norms(tensors: Sequence[Tensor], p: float, foreach: bool | None) -> list[Tensor]:
    """The norm of each, in float32 at least: in half precision norms overflow."""
    norms: dict[int, Tensor] = {}
    for (_, dtype), indices in _alike(tensors).items():
        alike, wide = [tensors[i] for i in indices], torch.promote_types(dtype, torch.float32)
        found: Sequence[Tensor]
        if foreach is False:
            found = [torch.linalg.vector_norm(tensor, p, dtype=wide) for tensor in alike]
        else:
            found = torch._foreach_norm(alike, p, dtype=wide)
        norms.update(zip(indices, found, strict=True))
    return [norms[i] for i in range(len(tensors))]


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _over_ranks(norms: Tensor, groups: tuple[Group, ...], p: float) -> Tensor:
    """`[n]` norms of this rank's parts to those of the whole; every rank adds the same numbers in the same order."""
    for group in groups:
        norms = torch.linalg.vector_norm(torch.ops.pfc.gather(norms[None], *group), p, dim=0)
    return norms


def _scale_(tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
    for (device, _), indices in _alike(tensors).items():
        alike, here = [tensors[i] for i in indices], coefficient.to(device)
        if foreach is False:
            for tensor in alike:
                tensor.mul_(here)
        else:
            torch._foreach_mul_(alike, here)


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Indices of the tensors that a foreach kernel takes together."""
    indices = defaultdict(list)
    for i, tensor in enumerate(tensors):
        indices[tensor.device, tensor.dtype].append(i)
    return indices


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with one verdict for the group: an overflow on one rank skips the step on all of them.

    Where torch's looks at a rank's gradients alone, a head whose shard overflowed on one rank only would skip its step
    there, and the ranks' scales would part. Takes dense and sparse gradients, DTensors beside tensors, and a rank that
    has no gradient at all, such as one with an empty shard and a frozen backbone.

    `unscale_`, or `step` without it, is a collective: one all-gather of a number. So every rank calls them for the same
    optimizers in the same order.

    Args:
        device: the type of the device that the losses are on, "cuda" or "cpu".
        init_scale: what losses are multiplied by at first.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without an overflow, above 1.
        backoff_factor: what the scale is multiplied by after a step with one, below 1.
        growth_interval: number of steps in a row without an overflow.
        enabled: False makes `step` call the optimizer's and everything else do nothing.
        group: the ranks that step together, as for PartialFC: all that hold a part or a replica of the model.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        group: _group.GroupLike = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = _group.resolve(group)

    # Through it unscale_, step, and step of a fused optimizer find overflows: each once for an optimizer and step.
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = [found_inf]
        for parameters in _laid_out_alike(optimizer):
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            found_here = super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16)
            found += [inf.to(found_inf.device) for inf in found_here.values()]
        if len(found) == 1 and self._group.size == 1:
            return {}  # nobody had a gradient, of which torch complains
        verdict = torch.stack(found).amax(0, keepdim=True)
        return {found_inf.device: torch.ops.pfc.gather(verdict, *self._group).amax()}

    def scale_on(self, device: torch.device) -> Tensor | None:
        """`[]` float32: the scale, an alias that `update` changes; None if not enabled."""
        if not self._enabled:
            return None
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return self._scale

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's. After `unscale_`, an overflow in any optimizer that was unscaled by then skips the step.

        Gradients of several optimizers may have been clipped by their common norm since: nan in one is then in all.
        """
        state = self._per_optimizer_states.get(id(optimizer)) if self._enabled else None
        if state is not None and state["stage"] is OptState.UNSCALED:
            states = self._per_optimizer_states.values()
            found = [inf for other in states for inf in other["found_inf_per_device"].values()]
            state["found_inf_per_device"] = {inf.device: torch.stack(found).amax() for inf in found[:1]}
        return super().step(optimizer, *args, **kwargs)


def _laid_out_alike(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Parameters with a gradient, tensors and DTensors apart: torch's kernel takes one layout at a time."""
    parts: dict[tuple[Any, Any], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                parts[getattr(grad, "device_mesh", None), getattr(grad, "placements", None)].append(parameter)
    return list(parts.values())
