"""Guards against wrappers that would mix the shards of different ranks.

Data-parallel wrappers take a parameter of one name for the same parameter on every rank, and copy, split or average it.
A head's weight is another one on each rank of its group. A wrapper over ranks that do not share a head's group, as in
one head per machine and DDP across machines, is right about it and is let through.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ._shards import group_of
from .ops import _group
from .ops._group import Group


@functools.cache
def guard_ddp() -> None:
    """From now on DDP raises when it wraps a model with a shard that it was not told to ignore.

    DDP copies rank 0's parameters to every rank without asking the modules that hold them, so the guard watches for the
    moment at which it takes the model in.
    """

    @torch.compiler.disable  # compiled autograd registers modules of its own while it traces
    def check(parent: nn.Module, name: str, model: nn.Module | None) -> None:
        if not (isinstance(parent, DistributedDataParallel) and name == "module" and model is not None):
            return
        ranks = torch.distributed.get_process_group_ranks(parent.process_group)
        exposed = [
            path
            for path, parameter in model.named_parameters()
            if path not in parent.parameters_to_ignore and _is_mixed(group_of(parameter), ranks)
        ]
        if exposed:
            raise RuntimeError(
                f"DistributedDataParallel would overwrite the class shards {exposed} of this model with rank 0's: "
                "wrap the backbone alone, or name them in model._ddp_params_and_buffers_to_ignore before wrapping "
                "(replicate: ignored_modules=[head])"
            )

    register_module_module_registration_hook(check)


def check_weight(weight: Tensor, group: Group) -> None:
    """Raises where a wrapper puts a tensor of its own in place of the shard of a rank in `group`.

    Raises:
        RuntimeError: a DTensor, from fully_shard or distribute_module, over ranks that hold other classes; or a tensor
            that is no parameter, from FullyShardedDataParallel.
    """
    mesh = getattr(weight, "device_mesh", None)  # a DTensor's; its class takes half a second to import
    if mesh is not None:
        ranks = mesh.mesh.flatten().tolist()
        if _is_mixed(group, ranks):
            raise RuntimeError(
                f"weight must stay this rank's shard of the classes, got a DTensor over ranks {ranks}, which hold "
                "different classes: pass ignored_params={head.weight} to fully_shard, and leave the head out of "
                "distribute_module and parallelize_module"
            )
    elif group.size > 1 and not isinstance(weight, nn.Parameter):
        raise RuntimeError(
            "weight must stay a torch.nn.Parameter with this rank's shard of the classes, got a "
            f"{type(weight).__name__}: pass ignored_states=[head.weight] to FullyShardedDataParallel"
        )


def _is_mixed(group: Group | None, ranks: Iterable[int]) -> bool:
    """Whether `ranks` hold more than one shard of `group`."""
    return group is not None and group.size > 1 and len(_group.global_ranks(group).intersection(ranks)) > 1
