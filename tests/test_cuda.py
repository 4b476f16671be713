"""On a CUDA device: the operators equal the CPU's, and a step never waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_pfc

from .inputs import IGNORE, check_step, head_step, random_batch, s1
from .test_ops_gather import ALONE
from .test_ops_sharded_lse import draw

pytestmark = pytest.mark.cuda


def on_cuda(value: Any) -> Any:
    """A copy on the device that is a leaf of its own."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().cuda().requires_grad_(value.requires_grad)


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_sampled", [0, 7, 40])
def test_sample_draws_the_cpus_set(num_sampled: int) -> None:
    labels = torch.tensor([3, 17, IGNORE, 39, 120])
    for key in range(20):
        arguments = (labels, torch.tensor(key), 10, 40, num_sampled, IGNORE)
        expected = torch.ops.pfc.sample(*arguments)
        found = torch.ops.pfc.sample(*map(on_cuda, arguments))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("num_sampled", [None, 60, 0])
def test_sharded_lse_equals_the_cpus(num_sampled: int | None, dtype: torch.dtype, tolerance: float) -> None:
    batch = random_batch(32, 300, 64, scale=1.0, seed=0)
    index, target, _ = draw(batch.labels, 300, num_sampled)
    x = batch.embeddings.to(dtype).requires_grad_()
    w = batch.weight.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    results = []
    for place in (lambda value: value, on_cuda):
        leaves = (place(x), place(w))
        outputs = torch.ops.pfc.sharded_lse(*leaves, place(index), place(target), True, *ALONE)
        gradients = torch.autograd.grad(sum(t.sum() for t in outputs), leaves)
        results.append([t.detach().double().cpu() for t in (*outputs, *gradients)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_the_written_down_numbers() -> None:
    batch = s1()
    batch.embeddings, batch.weight, batch.labels = batch.embeddings.cuda(), batch.weight.cuda(), batch.labels.cuda()
    step = head_step(batch, [8], margin=torch_pfc.CosFace(0.35), device="cuda")
    check_step(step, 15.866523600, 4.773160049, 7.254128149)


@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_a_step_does_not_wait_for_the_device(sample_rate: float, sparse_grad: bool) -> None:
    head = torch_pfc.PartialFC(64, 1000, sample_rate=sample_rate, sparse_grad=sparse_grad, device="cuda")
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (16,), device="cuda")
    head(x, labels).backward()
    head.zero_grad()
    with no_sync():
        head(x, labels).backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("saved_bytes", [0, 17 * 300 * 4, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_logits_give_the_same_step(sample_rate: float, saved_bytes: int, dtype: torch.dtype) -> None:
    batch = random_batch(16, 1000, 64, scale=16.0, seed=0)
    batch.embeddings, batch.weight, batch.labels = batch.embeddings.cuda(), batch.weight.cuda(), batch.labels.cuda()
    options: dict[str, Any] = {"sample_rate": sample_rate, "device": "cuda"}
    steps = []
    for number_of_bytes in (0, saved_bytes):
        head = torch_pfc.PartialFC(64, 1000, scale=16.0, saved_logits_bytes=number_of_bytes, **options)
        with torch.no_grad():
            head.weight.copy_(batch.weight)
        x = batch.embeddings.to(dtype).requires_grad_()
        loss = head(x, batch.labels, key=torch.tensor(1, device="cuda"))
        loss.backward()
        steps.append((loss.detach(), x.grad, head.weight.grad))
    torch.testing.assert_close(steps[1], steps[0])


FUSED: list[tuple[Any, dict[str, Any]]] = [
    (torch_pfc.optim.SparseSGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch_pfc.optim.SparseAdamW, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("make, options", FUSED)
@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("place_lr", [float, torch.tensor, lambda lr: torch.tensor(lr, device="cuda")])
def test_a_fused_head_steps_as_its_optimizer_does(
    make: Any, options: dict[str, Any], sample_rate: float, scaled: bool, place_lr: Any
) -> None:
    """Whether lr is a number, on the host or on the device; an overflow in between changes nothing."""
    values = []
    for fused in (True, False):
        torch.manual_seed(0)
        head = torch_pfc.PartialFC(64, 1000, sample_rate=sample_rate, sparse_grad=sample_rate < 1, device="cuda")
        optimizer = make([head.weight], lr=place_lr(0.01), **options)
        scaler = torch_pfc.GradScaler("cuda", init_scale=1024.0) if scaled else None
        if fused:
            head.fuse(optimizer, scaler)
        for number in range(4):
            x = torch.randn(16, 64, device="cuda", requires_grad=True)
            loss = head(x, torch.arange(16, device="cuda"), key=torch.tensor(number, device="cuda"))
            overflow = scaled and number == 2
            if fused:
                loss = loss if scaler is None else scaler.scale(loss)
                (loss * (float("inf") if overflow else 1.0)).backward()
            elif not overflow:
                loss.backward()
            assert (head.weight.grad is None) == (fused or overflow)
            optimizer.step()
            optimizer.zero_grad()
        values.append([head.weight.detach(), *(t.cpu() for t in optimizer.state[head.weight].values())])
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("make, options", FUSED)
@pytest.mark.parametrize("sample_rate", [1.0, 0.2, 0.0])
def test_a_fused_step_does_not_wait_for_the_device(make: Any, options: dict[str, Any], sample_rate: float) -> None:
    head = torch_pfc.PartialFC(64, 1000, sample_rate=sample_rate, saved_logits_bytes=1 << 14, device="cuda")
    head.fuse(make([head.weight], lr=0.01, **options))
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    labels = torch.randint(1000, (16,), device="cuda")
    head(x, labels).backward()
    with no_sync():
        head(x, labels).backward()
    torch.cuda.synchronize()
