"""The kernels never ask an accelerator for a value: what they call is watched here on CPU tensors.

On CUDA itself `torch.cuda.set_sync_debug_mode` says the same (test_cuda.py). Without reads of values, and with shapes
that follow from shapes, a step has static addresses and may be captured in a CUDA graph.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pfc.ops.gather import gather
from torch_pfc.ops.sample import local_target, sample
from torch_pfc.ops.sharded_lse import sharded_lse, sharded_lse_backward, sharded_lse_saving
from torch_pfc.ops.sharded_lse_update import sharded_lse_update, sharded_lse_update_backward_
from torch_pfc.ops.sharded_topk import sharded_topk
from torch_pfc.plan._kernels import cuda_kernels
from torch_pfc.plan._trace import AsCuda

from .test_ops_gather import ALONE
from .tiles import tiles_of

# Operators whose result, or whose result's shape, the host must wait for.
SYNCS = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2"}
SYNCS |= {"unique_consecutive", "bincount", "repeat_interleave", "_to_copy"}


# On the host, so it may be read.
LR = torch.tensor(0.1)


class NoSync(TorchDispatchMode):
    """Raises on an operator that waits for the device, and on boolean indexing, which counts on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()
        self.overloads: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.called.add(name)
        self.overloads.add(f"{name}.{func._overloadname}")
        if name == "_local_scalar_dense" and args[0] is LR:
            return 0.1
        moves = name != "_to_copy" or kwargs.get("device") is not None
        if name in SYNCS and moves:
            raise AssertionError(f"{func} waits for the device")
        if name in {"index", "index_put", "index_put_"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise AssertionError(f"{func} with a mask waits for the device")
        return func(*args, **kwargs)


def run_every_kernel(dtype: torch.dtype, num_sampled: int | None, sparse_grad: bool) -> None:
    labels, key = torch.tensor([3, -100, 7, 3]), torch.tensor(1)
    embeddings, weight = torch.randn(4, 8).to(dtype), torch.randn(40, 8)
    gather._init_fn(embeddings, *ALONE)
    index, target = None, local_target(labels, 0, 40, -100)
    if num_sampled is not None:
        index, target = sample._init_fn(labels, key, 0, 40, num_sampled, -100)
    operands = (embeddings, weight, index, target, True)
    sharded_lse._init_fn(*operands, *ALONE, sparse_grad)
    *_, logits = sharded_lse_saving._init_fn(*operands, *ALONE, sparse_grad, 4 * 5 * 10)
    terms = torch.randn(4, 3)
    for saved in ((), (logits,)):
        sharded_lse_backward._init_fn(*operands, terms, 1.0, True, True, sparse_grad, *saved)
    update = ("sgd", [torch.zeros_like(weight)], LR, [0.9, 0.1, 1.0, 0.0], None)
    sharded_lse_update._init_fn(*operands, *ALONE, 4 * 5 * 10, *update)
    sharded_lse_update_backward_._init_fn(*operands, terms, 1.0, logits, *update)
    sharded_topk._init_fn(embeddings, weight, 5, *ALONE)


every_sampling = pytest.mark.parametrize("num_sampled", [None, 0, 4, 30])
every_gradient = pytest.mark.parametrize("sparse_grad", [False, True])


@every_sampling
@every_gradient
def test_no_kernel_waits_for_the_device(num_sampled, sparse_grad):
    """In float32, where an accelerator's path is the CPU's but for the tiles' size and the draw in one piece."""
    with cuda_kernels(), tiles_of(100), NoSync() as mode:
        run_every_kernel(torch.float32, num_sampled, sparse_grad)
    assert {"mm", "exp_", "topk", "index_put_"} <= mode.called  # the watch saw the kernels' inside


@every_sampling
@every_gradient
def test_the_accelerators_path_in_half_precision_does_not_either(num_sampled, sparse_grad):
    """Its matmuls from half to float32 exist on CUDA alone, so on fake tensors: those have no values to wait for."""
    with FakeTensorMode(allow_non_fake_inputs=True), AsCuda(), cuda_kernels(), tiles_of(100), NoSync() as mode:
        run_every_kernel(torch.bfloat16, num_sampled, sparse_grad)
    assert "mm.dtype" in mode.overloads


def test_the_watch_sees_a_sync():
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        torch.tensor([1, 0]).nonzero()
