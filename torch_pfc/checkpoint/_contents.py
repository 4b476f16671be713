"""What a checkpoint holds: tensors under their names, and the tree that they were taken out of.

    head.<name>                           the head's state; head.weight is [C, D], split by class
    optimizer.state.<parameter>.<name>    the optimizer's state; of the head's weight, [C, D] is split by class
    others.<name>.<name>                  tensors of the other objects' state dicts
    torch_pfc                             everything that is no tensor: the same trees, with None where a tensor was

`head` is a PartialFC, `others` a mapping from names to objects with a state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _shards
from .._state_dict import by_class, sharded_state_dict

if TYPE_CHECKING:
    from ..partial_fc import PartialFC

MARKER = "torch_pfc"
FORMAT = 1


def collect(head: PartialFC, optimizer: Optimizer | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint of these objects; tensors alias theirs.

    Raises:
        TypeError: one of `others` has no state dict.
        ValueError: state that does not say how it is split over the ranks.
    """
    tree: dict[str, Any] = {"head": sharded_state_dict(head), "others": {}}
    if optimizer is not None:
        tree["optimizer"] = _optimizer_state(optimizer, head)
    for name, other in others.items():
        _check_other(name, other)
        tree["others"][name] = other.state_dict()
    tensors: dict[str, Tensor] = {}
    plain = {name: _take_tensors(part, name, tensors) for name, part in tree.items()}
    position = None if optimizer is None else weight_position(optimizer, head)
    return {MARKER: {"format": FORMAT, "weight_position": position, "tree": plain}, **tensors}


def _take_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Moves the tensors of `tree` to `tensors`, by their paths. Parts without a tensor stay the objects they are."""
    if isinstance(tree, Tensor):
        if name in tensors:
            raise ValueError(f"state dicts must give each tensor a path of its own, got two at {name}")
        tensors[name] = tree
        return None
    before = len(tensors)
    taken: Any = None
    if isinstance(tree, dict):
        taken = {key: _take_tensors(value, f"{name}.{key}", tensors) for key, value in tree.items()}
    elif isinstance(tree, (list, tuple)):
        taken = [_take_tensors(value, f"{name}.{i}", tensors) for i, value in enumerate(tree)]
        taken = tuple(taken) if isinstance(tree, tuple) else taken
    return taken if len(tensors) > before else tree


def _put_tensors(tree: Any, name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_take_tensors`."""
    if name in tensors:
        return tensors[name]
    if type(tree) is dict:
        return {key: _put_tensors(value, f"{name}.{key}", tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_put_tensors(value, f"{name}.{i}", tensors) for i, value in enumerate(tree))
    return tree


def weight_position(optimizer: Optimizer, head: PartialFC) -> int | None:
    """Which of the optimizer's parameters the head's weight is, as its state dict counts them; None if it is none."""
    found = None
    for position, parameter in enumerate(parameters_of(optimizer)):
        if parameter is head.weight:
            found = position
        elif _shards.group_of(parameter) is not None:
            raise ValueError(
                f"the optimizer must hold the shard of this head alone, got another as parameter {position}"
            )
    return found


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order in which its state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(optimizer: Optimizer, head: PartialFC) -> dict[str, Any]:
    """`optimizer.state_dict()` with the state of the head's weight as `[C, D]`."""
    state = optimizer.state_dict()
    position = weight_position(optimizer, head)
    if position not in state["state"]:
        return state
    values = state["state"][position]
    check_class_state(values, head)
    sharded = {key: by_class(v, head) if is_class_state(v) else v for key, v in values.items()}
    return state | {"state": state["state"] | {position: sharded}}


def is_class_state(value: Any) -> bool:
    """Whether an entry of the state of a head's weight has the weight's rows."""
    return isinstance(value, Tensor) and value.dim() > 0


def check_class_state(values: Mapping[str, Any], head: PartialFC) -> None:
    """Raises ValueError if a tensor of the state of the head's weight has neither its shape nor is a scalar."""
    for key, value in values.items():
        if is_class_state(value) and value.shape != head.weight.shape:
            raise ValueError(
                "the optimizer's state must have the weight's shape to be split by class, got "
                f"{key} of {list(value.shape)} for a weight of {list(head.weight.shape)}"
            )


def _check_other(name: str, other: Any) -> None:
    if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
        raise TypeError(f"others[{name!r}] must have state_dict and load_state_dict, got a {type(other).__name__}")
    parameters: list[Tensor] = []
    if isinstance(other, nn.Module):
        parameters = list(other.parameters())
    elif isinstance(other, Optimizer):
        parameters = parameters_of(other)
    if any(_shards.group_of(parameter) is not None for parameter in parameters):
        raise ValueError(f"others[{name!r}] must be the same on every rank, but holds the shard of a head")


def put_back(
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    head: PartialFC,
    optimizer: Optimizer | None,
    others: Mapping[str, Any],
) -> None:
    """Loads the objects from what was read; the head and its optimizer last, as they are known to fit."""
    position = description["weight_position"]
    split = ("head.weight", f"optimizer.state.{position}.")
    own = {
        name: tensor.to_local() if isinstance(tensor, DTensor) and name.startswith(split) else tensor
        for name, tensor in tensors.items()
    }
    tree = description["tree"]
    for name, other in others.items():
        other.load_state_dict(_put_tensors(tree["others"][name], f"others.{name}", own))
    if optimizer is not None:
        optimizer.load_state_dict(_put_tensors(tree["optimizer"], "optimizer", own))
    head.load_state_dict(_put_tensors(tree["head"], "head", own))
