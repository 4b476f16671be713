"""PartialFC.fuse: a backward that steps is the backward and the step, bit for bit, and leaves no gradient behind."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_pfc
from torch_pfc.checkpoint import load, resize, save
from torch_pfc.optim import SparseAdamW, SparseSGD
from torch_pfc.plan._trace import _KERNELS

from .inputs import IGNORE, even, make_head, my_rows, random_batch
from .ranks import run_ranks
from .tiles import tiles_of

Options = dict[str, Any]
MOMENTUM: Options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
ADAMW: Options = {"lr": 0.01, "weight_decay": 0.1}
RULES: list[tuple[Any, Options]] = [(SparseSGD, MOMENTUM), (SparseAdamW, ADAMW)]
EVERY_OPTION: list[tuple[Any, Options]] = [
    *RULES,
    (SparseSGD, {"lr": 0.1}),
    (SparseSGD, MOMENTUM | {"nesterov": True}),
    (SparseSGD, MOMENTUM | {"maximize": True}),
    (SparseAdamW, ADAMW | {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-3}),
]


class Training:
    """A head that steps by itself, or its twin that is stepped; both see the same batches and keys."""

    def __init__(
        self, fused: bool, make: Any, options: Options, num_classes: int, dtype: torch.dtype, **head_options: Any
    ) -> None:
        batch = random_batch(1, num_classes, 3, scale=8.0, seed=0)
        self.head = make_head(batch, dtype, **head_options)
        self.optimizer = make([self.head.weight], **copy.deepcopy(options))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.dtype = torch.promote_types(dtype, torch.float32)
        if fused:
            self.head.fuse(self.optimizer)

    def step(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns the loss and the embeddings' gradient."""
        world_size = self.head.group.size
        batch = random_batch(4 * world_size, self.head.num_classes, 3, scale=8.0, seed=number)
        batch.labels[0] = IGNORE
        counts = even(4 * world_size, world_size)
        x = my_rows(batch.embeddings, counts).to(self.dtype).requires_grad_()
        loss = self.head(x, my_rows(batch.labels, counts), key=torch.tensor(number))
        loss.backward()
        assert x.grad is not None
        assert self.head._fused is None or self.head.weight.grad is None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach(), x.grad

    def values(self) -> list[Tensor]:
        """Copies of the weight and of its state."""
        state = self.optimizer.state[self.head.weight]
        return [t.detach().clone() for t in (self.head.weight, *(state[name] for name in sorted(state)))]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def against_its_twin(
    make: Any,
    options: Options,
    num_classes: int,
    dtype: torch.dtype,
    head_options: Options,
    tile_elements: int,
    change: Callable[[Training, int], None] | None = None,
) -> None:
    """Four steps, bit for bit. `change` is done to both in between."""
    fused, twin = (Training(fused, make, options, num_classes, dtype, **head_options) for fused in (True, False))
    where = fused.head.weight.data_ptr()
    for number in range(4):
        with tiles_of(tile_elements):
            assert_same([*fused.step(number)], [*twin.step(number)])
        assert_same(fused.values(), twin.values())
        if change is None:
            assert fused.head.weight.data_ptr() == where
        else:
            change(fused, number)
            change(twin, number)


@pytest.mark.parametrize("make, options", EVERY_OPTION)
def test_steps_are_the_optimizers_on_any_number_of_ranks(make: Any, options: Options) -> None:
    """All classes, sampled with and without padding, an empty shard (2 classes on 3 ranks)."""
    for world_size, (num_classes, rate) in itertools.product((1, 2, 3), [(7, 1.0), (40, 0.4), (9, 0.0), (2, 0.5)]):
        head_options = {"sample_rate": rate, "sparse_grad": rate < 1}
        run_ranks(world_size, against_its_twin, make, options, num_classes, torch.float64, head_options, 12)


@pytest.mark.parametrize("make, options", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [1.0, 0.4, 0.0])
def test_steps_are_the_optimizers_in_any_precision(
    make: Any, options: Options, dtype: torch.dtype, rate: float
) -> None:
    """Of the weight; and with a learning rate that is a tensor."""
    options = options | {"lr": torch.tensor(options["lr"])}
    head_options = {"sample_rate": rate, "sparse_grad": rate < 1}
    against_its_twin(make, options, 40, dtype, head_options, 1 << 20)


@pytest.mark.parametrize("saved_bytes", [1, 200, 1 << 20])
def test_saved_logits_change_nothing(saved_bytes: int) -> None:
    """Which the twin has too: the tiles begin and end where saved ones do."""
    head_options = {"sample_rate": 0.4, "sparse_grad": True, "saved_logits_bytes": saved_bytes}
    against_its_twin(SparseAdamW, ADAMW, 40, torch.float64, head_options, 12)


def reload(training: Training, number: int) -> None:
    if number == 1:
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        training.head.load_state_dict(training.head.state_dict())


def grow(training: Training, number: int) -> None:
    if number == 1:
        torch.manual_seed(0)
        resize(training.head, 50, optimizer=training.optimizer)


@pytest.mark.parametrize("change", [reload, grow])
@pytest.mark.parametrize("make, options", RULES)
def test_state_may_be_replaced_between_steps(make: Any, options: Options, change: Any) -> None:
    head_options = {"sample_rate": 0.4, "sparse_grad": True}
    run_ranks(2, against_its_twin, make, options, 40, torch.float64, head_options, 12, change)


@pytest.mark.parametrize("make, options", RULES)
def test_a_checkpoint_goes_on_where_the_run_was(make: Any, options: Options, tmp_path: Path) -> None:
    run, other = (Training(True, make, options, 40, torch.float64, sample_rate=0.4) for _ in range(2))
    run.step(0)
    save(tmp_path / "at", run.head, run.optimizer)
    run.step(1)
    other.step(2)
    load(tmp_path / "at", other.head, other.optimizer)
    other.step(1)
    assert_same(other.values(), run.values())


def test_rows_that_take_no_part_keep_every_bit() -> None:
    """Padding, which is in the index, and the others. Rate 0 scores the labels' classes alone."""
    run = Training(True, SparseSGD, MOMENTUM, 9, torch.float32, sample_rate=0.0)
    buffer = run.optimizer.state[run.head.weight]["momentum_buffer"].normal_()
    buffer[0] = -0.0
    before = [tensor.view(torch.int32) for tensor in run.values()]
    labels = torch.tensor([4, 7, 4, 4])
    run.head(torch.randn(4, 3, requires_grad=True), labels, key=torch.tensor(0)).backward()
    for after, bits in zip(run.values(), before, strict=True):
        assert set((after.view(torch.int32) != bits).any(dim=1).nonzero()[:, 0].tolist()) == {4, 7}


def is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes, also inside of the library's."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pfc":
            with self:
                result = _KERNELS[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_strided(t)}
        for tensor in filter(is_strided, tree_leaves(result)):
            if tensor.untyped_storage()._cdata not in storages:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_gradient_is_made() -> None:
    """Nothing of the size of the 10,000 rows that take part."""
    for fused in (True, False):
        head = torch_pfc.PartialFC(16, 20_000, sample_rate=0.5, sparse_grad=True)
        optimizer = SparseSGD([head.weight], lr=0.1, momentum=0.9)
        if fused:
            head.fuse(optimizer)
        with tiles_of(1 << 12), Largest() as largest:
            head(torch.randn(4, 16, requires_grad=True), torch.arange(4), key=torch.tensor(0)).backward()
        assert (largest.elements >= 10_000 * 16) == (not fused)
        assert (head.weight.grad is None) == fused
