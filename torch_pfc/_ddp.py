"""A guard against DistributedDataParallel around a sharded head.

DDP copies rank 0's parameters to every rank when it wraps a model, and so would make every shard rank 0's. It does so
without asking the modules inside, so the guard watches for the moment at which DDP takes the model in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_guarded: set[type] = set()


def guard_shards(head_type: type[Any]) -> None:
    """Makes DDP raise when it wraps a model with a sharded head of that type whose weight it was not told to ignore."""
    if head_type in _guarded:
        return
    _guarded.add(head_type)

    @torch.compiler.disable  # compiled autograd registers modules of its own while it traces
    def check(parent: nn.Module, name: str, model: nn.Module | None) -> None:
        if not (isinstance(parent, DistributedDataParallel) and name == "module" and model is not None):
            return
        shards = [
            f"{path}.weight".lstrip(".")
            for path, module in model.named_modules()
            if isinstance(module, head_type) and module.group.size > 1
        ]
        exposed = [shard for shard in shards if shard not in parent.parameters_to_ignore]
        if exposed:
            raise RuntimeError(
                f"DistributedDataParallel would overwrite the class shards {exposed} of this model with rank 0's: "
                "wrap the backbone alone, or name them in model._ddp_params_and_buffers_to_ignore before wrapping"
            )

    register_module_module_registration_hook(check)
