"""What is done before a checkpoint is read: it is compared with the objects to load, and room is made beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._state_dict import by_class, check_entries
from ._contents import FORMAT, MARKER, collect, is_class_state, parameters_of, weight_position

if TYPE_CHECKING:
    from ..partial_fc import PartialFC


def check_is_ours(metadata: Metadata, source: str) -> None:
    """Raises RuntimeError unless the checkpoint was written by this library."""
    if MARKER not in metadata.state_dict_metadata:
        names = sorted(metadata.state_dict_metadata)[:5]
        raise RuntimeError(f"{source} is no checkpoint of torch_pfc.checkpoint: its first entries are {names}")


def make_room(
    description: Mapping[str, Any],
    metadata: Metadata,
    head: PartialFC,
    optimizer: Optimizer | None,
    others: Mapping[str, Any],
    source: str,
) -> dict[str, Tensor]:
    """Tensors to read a checkpoint into, beside those in use and split as they are.

    Args:
        description: its entry `MARKER`.
        source: what to call it in errors.

    Raises:
        ValueError: the checkpoint is of other objects.
    """
    if description["format"] != FORMAT:
        raise ValueError(f"{source} must be of format {FORMAT}, got {description['format']}")
    saved = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    in_use = collect(head, optimizer, others)
    tree, position = description["tree"], description["weight_position"]
    check_entries(head, tree["head"] | _under("head.", saved), source)
    if optimizer is not None:
        _check_optimizer(tree, position, optimizer, head, source)
    _check_others(tree, others, saved, in_use, source)

    wanted = ("head.", *(["optimizer."] if optimizer is not None else []), *(f"others.{name}." for name in others))
    by_parameter = _state_prefixes(optimizer, others)
    room: dict[str, Tensor] = {}
    for name, entry in saved.items():
        if not name.startswith(wanted):
            continue
        is_weights = name.startswith(f"optimizer.state.{position}.") and is_class_state(entry)
        model = in_use.get(name, _parameter_of(name, by_parameter))
        if name == "head.weight" or is_weights:
            room[name] = by_class(torch.empty(head.weight.shape, dtype=entry.dtype), head)
        elif isinstance(model, DTensor) and model.shape == entry.shape:
            room[name] = torch.empty_like(model, dtype=entry.dtype, requires_grad=False)
        else:
            room[name] = torch.empty(entry.shape, dtype=entry.dtype)
    return room


def _under(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_optimizer(
    tree: Mapping[str, Any], saved_position: int | None, optimizer: Optimizer, head: PartialFC, source: str
) -> None:
    if "optimizer" not in tree:
        raise ValueError(f"{source} must hold an optimizer to load one, but was saved without")
    _check_groups(tree["optimizer"], optimizer, source)
    position = weight_position(optimizer, head)
    if saved_position != position:
        raise ValueError(
            f"{source} must have the head's weight at the optimizer's position {position}, got {saved_position}"
        )


def _check_groups(state: Mapping[str, Any], optimizer: Optimizer, source: str) -> None:
    saved, own = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != own:
        raise ValueError(f"{source} must be of an optimizer with groups of {own} parameters, got groups of {saved}")


def _check_others(
    tree: Mapping[str, Any],
    others: Mapping[str, Any],
    saved: Mapping[str, Tensor],
    in_use: Mapping[str, Any],
    source: str,
) -> None:
    """Compares what can be told without asking the objects: names, optimizers' groups, modules' entries, shapes."""
    missing = sorted(others.keys() - tree["others"].keys())
    if missing:
        raise ValueError(f"{source} must hold the others {missing}, got {sorted(tree['others'])}")
    for name, other in others.items():
        found, own = _under(f"others.{name}.", saved), _under(f"others.{name}.", in_use)
        if isinstance(other, Optimizer):
            _check_groups(tree["others"][name], other, source)
        if isinstance(other, nn.Module) and found.keys() != own.keys():
            difference = sorted(found.keys() ^ own.keys())[:5]
            raise ValueError(f"others.{name} of {source} must have the entries of the one given, but not {difference}")
        for key, value in own.items():
            if key in found and found[key].shape != value.shape:
                raise ValueError(
                    f"others.{name}.{key} of {source} must be {list(value.shape)}, got {list(found[key].shape)}"
                )


def _state_prefixes(optimizer: Optimizer | None, others: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """What names of optimizer state begin with, and the parameters that the number after it counts."""
    optimizers = {f"others.{name}.state.": other for name, other in others.items() if isinstance(other, Optimizer)}
    if optimizer is not None:
        optimizers["optimizer.state."] = optimizer
    return {prefix: parameters_of(owner) for prefix, owner in optimizers.items()}


def _parameter_of(name: str, by_parameter: Mapping[str, list[Tensor]]) -> Tensor | None:
    """The parameter that an entry is the state of: an optimizer that has made no step has no state to look at."""
    for prefix, parameters in by_parameter.items():
        if name.startswith(prefix):
            return parameters[int(name.removeprefix(prefix).split(".")[0])]
    return None
