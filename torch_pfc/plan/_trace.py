"""What a step would do, found by running it on fake tensors: their storages come and go, and hold nothing.

The one file of the planner that uses private names of PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.gather import gather
from ..ops.sample import sample
from ..ops.sharded_lse import sharded_lse, sharded_lse_backward, sharded_lse_saving
from ..ops.sharded_lse_update import sharded_lse_update, sharded_lse_update_backward_
from ..ops.sparse_adamw import sparse_adamw_
from ..ops.sparse_sgd import sparse_sgd_
from ._kernels import cpu_kernels, cuda_kernels, short_walks

try:
    from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group, _unregister_process_group
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Operators whose fake kernels show shapes alone: they are opened, and their own kernels run on fake tensors.
    _KERNELS = {
        op._opoverload: op._init_fn
        for op in (
            gather,
            sample,
            sharded_lse,
            sharded_lse_saving,
            sharded_lse_backward,
            sharded_lse_update,
            sharded_lse_update_backward_,
            sparse_sgd_,
            sparse_adamw_,
        )
    }
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch_pfc.plan needs private names of PyTorch as 2.13 has them, torch {torch.__version__} differs: {error}"
    ) from error

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

# Where the matrices of a product stand among the arguments.
_FIRST_FACTOR = {aten.mm: 0, aten.addmm: 1, aten.addmm_: 1}
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_READS = [aten._local_scalar_dense.default, aten.item.default]  # by an operator's kernel as it stands
_PARTS = {aten._indices: 0, aten.indices: 0, aten._values: 1, aten.values: 1}


@dataclass(frozen=True)
class Collective:
    """One collective as one rank sees it.

    Attributes:
        name: of `torch.ops._c10d_functional`.
        bytes_in: of the tensor that this rank puts in.
        bytes_out: of the tensor that it gets.
    """

    name: str
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class Phase:
    """A part of a step on one rank.

    Attributes:
        peak_bytes: the most that tensors held at any moment of it, those from before it included.
        matmul_flops: 2·m·k·n for each product of `[m, k]` and `[k, n]`.
        collectives: in order.
    """

    peak_bytes: int
    matmul_flops: int
    collectives: tuple[Collective, ...]


class Trace(TorchDispatchMode):
    """Counts what fake tensors would hold, multiply and exchange; to be entered inside a FakeTensorMode.

    Values are not known to it. Where the program asks for one it is told True, or one: labels are in range, and
    Adam's count of steps matters to no shape.

    Args:
        around_kernels: makes a context for the kernels of torch_pfc's operators.

    Attributes:
        live_bytes: of all tensors made since it was entered that still exist.
        matmul_flops: of this phase so far.
    """

    def __init__(self, around_kernels: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        super().__init__()
        self._around_kernels = around_kernels
        self.live_bytes = 0
        self._storages: set[int] = set()
        # Indices and values of fake COO tensors, which forget them.
        self._parts = WeakTensorKeyDictionary()
        self._begin()

    def _begin(self) -> None:
        self._peak_bytes, self.matmul_flops = self.live_bytes, 0
        self._collectives: list[Collective] = []

    def end_phase(self) -> Phase:
        """Returns what happened since the last call."""
        phase = Phase(self._peak_bytes, self.matmul_flops, tuple(self._collectives))
        self._begin()
        return phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "pfc":
            with self, self._around_kernels():
                return _KERNELS[func](*args, **kwargs)
        if func is c10d.wait_tensor.default:
            return args[0]  # as on a real group; its fake kernel would make another tensor
        if func in _READS:
            return True if args[0].dtype == torch.bool else 1
        if func.overloadpacket in _PARTS:
            return self._parts[args[0]][_PARTS[func.overloadpacket]].detach()  # autograd makes a view of it
        result = func(*args, **kwargs)
        if func is aten._sparse_coo_tensor_with_dims_and_tensors.default:
            self._parts[result] = args[3:5]
        if func is aten.clone.default and args[0].is_sparse:
            # Autograd takes a gradient over, but copies one that others refer to, as this mode does.
            self._parts[result] = self._parts[args[0]]
        if func.overloadpacket in _FIRST_FACTOR:
            a, b = args[_FIRST_FACTOR[func.overloadpacket] :][:2]
            self.matmul_flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if func.namespace == "_c10d_functional":
            self._collectives.append(Collective(func.overloadpacket.__name__, num_bytes(args[0]), num_bytes(result)))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        if tensor.is_sparse:
            return  # its parts are held
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages.add(key)
            self.live_bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.live_bytes -= size


def num_bytes(tensor: Tensor) -> int:
    """Of the elements of a tensor, or of the indices and values of a COO tensor."""
    parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


@contextmanager
def fake_group(size: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """A process group of `size` ranks of which this process is number `rank`, beside any real one."""
    name: Any = f"torch_pfc.plan.{rank}/{size}"
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    _register_process_group(name, group)
    try:
        yield group
    finally:
        _unregister_process_group(name)


@contextmanager
def tracing(device: str) -> Iterator[Trace]:
    """Tensors made inside are fake, and counted.

    Args:
        device: "cpu" or "cuda". The tensors are the CPU's all the same, since fake ones of CUDA need a PyTorch that is
            built for it; what depends on the device in the operators follows this argument.
    """
    kernels, around_kernels = (cuda_kernels, AsCuda) if device == "cuda" else (cpu_kernels, nullcontext)
    with FakeTensorMode(), kernels(), Trace(around_kernels) as trace, short_walks(trace):
        yield trace


class AsCuda(TorchFunctionMode):
    """Tensors say that they are CUDA's: the operators then multiply halves without widening them first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == _IS_CUDA else func(*args, **(kwargs or {}))
