"""A module whose weight is this rank's shard, whatever becomes of it: moved, converted, copied, replaced, wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from . import _shards, _state_dict, _wrappers
from ._sparse_grad import drop_dead_hooks, keep_coalesced
from .ops._group import Group


class ShardedModule(nn.Module):
    """Makes each tensor that becomes `weight` known as a shard, and refuses those that would mix shards.

    Attributes:
        weight: Parameter `[K, D]`, this rank's shard over `group`.
        class_start: the first class of this rank.
        num_local_classes: K.
        num_classes: C.
        embedding_dim: D.
        group: set before `weight`, and kept.
        sparse_grad: whether the gradient of `weight` is a COO tensor, to be kept coalesced.
    """

    weight: nn.Parameter
    class_start: int
    num_local_classes: int
    num_classes: int
    embedding_dim: int
    group: Group
    sparse_grad: bool

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch.nn.Module. Being overridden, it is also what fully_shard calls to put its own parameter in place."""
        if name == "weight" and name not in self._parameters and isinstance(value, Tensor):
            _wrappers.check_weight(value, self.group)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch.nn.Module; every new parameter comes this way, by assignment or not."""
        if name == "weight" and param is not None:
            _wrappers.check_weight(param, self.group)
        super().register_parameter(name, param)
        self._adopt_weight()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        before = self._parameters.get("weight")
        super()._apply(fn, recurse)
        if before is not None and _shards.group_of(before) is None:  # its content was swapped for a new tensor's
            drop_dead_hooks(before)
        self._adopt_weight()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_weight()  # copies and unpickled modules lose what is on it

    def _adopt_weight(self) -> None:
        weight = self._parameters.get("weight")
        if weight is None:
            return
        _shards.mark(weight, self.group)
        if self.sparse_grad:
            keep_coalesced(weight)
        if self.group.size > 1:
            _wrappers.guard_ddp()

    def _check_weight(self) -> None:
        expected = (self.num_local_classes, self.embedding_dim)
        if self.weight.shape != expected:
            raise ValueError(
                f"weight must be this rank's shard {list(expected)} of the {self.num_classes} classes "
                f"(classes {self.class_start} … {self.class_start + self.num_local_classes - 1}), "
                f"got {list(self.weight.shape)}"
            )

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """The state dict for a `torch.distributed.checkpoint` call of one's own, to save from or to load into in place.

        Nothing is copied: the entries alias the head's tensors. For whole checkpoints see torch_pfc.checkpoint.

        Args:
            prefix: what names begin with.

        Returns:
            As `state_dict()`, with `weight` as a DTensor `[C, D]` over the head's group, sharded by class; in a group
            of one it is a plain tensor.
        """
        return _state_dict.sharded_state_dict(self, prefix)

    def load_sharded_state_dict(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """Copies in what `sharded_state_dict` gives; casts as `load_state_dict` does.

        Args:
            state: with the head's entries under `prefix`, and any others. Its weight may also be a whole `[C, D]`.
            prefix: what their names begin with.

        Raises:
            ValueError: another number of classes, width, set of entries, or split over ranks; the head is unchanged.
        """
        _state_dict.load_sharded_state_dict(self, state, prefix)
