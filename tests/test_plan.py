"""What the planner says of a step, held against real steps: profiled on gloo ranks, and their memory measured."""

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torch_pfc
from torch_pfc.ops import _tiles, sample
from torch_pfc.optim import SparseOptimizer
from torch_pfc.plan import DTYPES, OPTIMIZERS, Phase, Plan, _kernels, plan

from .ranks import close_pool, run_ranks

SIZES = {"float": 4, "long int": 8, "c10::BFloat16": 2}
COLLECTIVE = "_c10d_functional::"
FUSED = {"fused": True}


def dense(options: dict[str, Any]) -> dict[str, Any]:
    """With a dense gradient, unless they say otherwise or there is none."""
    return options if "fused" in options else {"sparse_grad": False} | options


def make(options: dict[str, Any], device: str = "cpu"):
    """Of this rank, from the planner's options: the head, its optimizer, embeddings and labels."""
    dtype = DTYPES[options.get("dtype", "fp32")]
    dim, num_classes, rows = options["embedding_dim"], options["num_classes"], options["batch_size"]
    head = torch_pfc.PartialFC(
        dim,
        num_classes,
        sample_rate=options.get("sample_rate", 1.0),
        sparse_grad=options.get("sparse_grad", False),
        saved_logits_bytes=options.get("saved_logits_bytes", 0),
        dtype=dtype,
        device=device,
    )
    optimizer = OPTIMIZERS[options.get("optimizer", "sgd")](head.parameters())
    if options.get("fused"):
        assert isinstance(optimizer, SparseOptimizer)
        head.fuse(optimizer)
    embeddings = torch.randn(rows, dim, dtype=dtype, device=device, requires_grad=True)
    return head, optimizer, embeddings, torch.randint(num_classes, (rows,), device=device)


def profiled(run) -> tuple[list[tuple[str, int, int]], int]:
    """Each collective's name, bytes in and bytes out; and the FLOPs of the matrix products."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        run()

    def num_bytes(event) -> int:
        return math.prod(event.input_shapes[0]) * SIZES[event.input_dtypes[0]]

    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    exchanged = [event for event in events if event.name.startswith(COLLECTIVE)]
    # Each is waited for before the next begins, and what is waited for is its output.
    starts, waits = exchanged[::2], exchanged[1::2]
    assert all(event.name == f"{COLLECTIVE}wait_tensor" for event in waits)
    collectives = [
        (start.name.removeprefix(COLLECTIVE), num_bytes(start), num_bytes(end))
        for start, end in zip(starts, waits, strict=True)
    ]
    factors = [event.input_shapes[:2] for event in events if event.name == "aten::mm"]
    factors += [event.input_shapes[1:3] for event in events if event.name == "aten::addmm_"]
    return collectives, sum(2 * m * k * n for (m, k), (_, n) in factors)


def profiled_step(options: dict[str, Any]):
    head, optimizer, embeddings, labels = make(options)
    losses = []
    forward = profiled(lambda: losses.append(head(embeddings, labels)))
    backward = profiled(losses[0].backward)
    update = profiled(optimizer.step)
    return forward, backward, update


def said(phase: Phase) -> tuple[list[tuple[str, int, int]], int]:
    return [(call.name, call.bytes_in, call.bytes_out) for call in phase.collectives], phase.matmul_flops


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 1000, "embedding_dim": 8, "batch_size": 3},
        {"num_classes": 1000, "embedding_dim": 16, "batch_size": 5, "sample_rate": 0.1, "dtype": "bf16"},
        {"num_classes": 1000, "embedding_dim": 8, "batch_size": 4, "sample_rate": 0.3, "sparse_grad": True},
        {"num_classes": 40_003, "embedding_dim": 128, "batch_size": 7, "optimizer": "momentum"},
        {"num_classes": 4, "embedding_dim": 8, "batch_size": 3, "sample_rate": 0.0, "optimizer": "adamw"},
        {"num_classes": 40_003, "embedding_dim": 128, "batch_size": 7, "saved_logits_bytes": 500_000},
        {"num_classes": 900, "embedding_dim": 8, "batch_size": 4, "sample_rate": 0.3, "optimizer": "sparse_momentum"},
        {"num_classes": 40_003, "embedding_dim": 128, "batch_size": 7, "optimizer": "sparse_sgd"} | FUSED,
        {"num_classes": 4, "embedding_dim": 8, "batch_size": 3, "sample_rate": 0.0, "optimizer": "sparse_adamw"}
        | FUSED
        | {"saved_logits_bytes": 1 << 20},
    ],
    ids=str,
)
def test_collectives_and_flops_are_those_of_a_real_step(options: dict[str, Any], world_size: int) -> None:
    """Every rank's: the last one holds fewer classes, or with four classes on three ranks none."""
    options = dense(options)
    for rank, measured in enumerate(run_ranks(world_size, profiled_step, options)):
        found = plan(ranks=world_size, rank=rank, **options)
        assert [said(phase) for phase in (found.forward, found.backward, found.update)] == list(measured)
        assert len(found.forward.collectives) == (0 if world_size == 1 else 4)


def resident(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def measured_bytes(options: dict[str, Any], tile_elements: int) -> dict[str, int]:
    """Bytes of weight, optimizer state and gradient, and by how much a step raises this process's resident set."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    _tiles.TILE_ELEMENTS = tile_elements
    head, optimizer, embeddings, labels = make(options)

    def step() -> None:
        head(embeddings, labels).backward()
        optimizer.step()

    def release() -> None:
        optimizer.zero_grad()
        embeddings.grad = None

    step()  # the first allocates what libraries keep for themselves
    release()
    libc.malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    step()
    growth = resident("VmHWM") - before
    grad = head.weight.grad
    gradient = [] if grad is None else [grad.indices(), grad.values()] if grad.is_sparse else [grad]
    return {
        "weight": total_bytes([head.weight]),
        "optimizer": total_bytes(value for state in optimizer.state.values() for value in state.values()),
        "gradient": total_bytes(gradient),
        "growth": growth,
    }


# A fused step holds little but the tiles that it works on: in these they weigh.
LARGE_TILES = {"tile_elements": 1 << 24}


def total_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize(
    "world_size, options",
    [
        (1, {"num_classes": 200_000, "embedding_dim": 256}),
        (1, {"num_classes": 200_000, "embedding_dim": 256, "optimizer": "adamw"}),
        (1, {"num_classes": 200_000, "embedding_dim": 256, "sample_rate": 0.1, "optimizer": "momentum"}),
        (1, {"num_classes": 1_400_000, "embedding_dim": 64, "sample_rate": 0.5, "sparse_grad": True}),
        (1, {"num_classes": 400_000, "embedding_dim": 256, "sample_rate": 0.2, "dtype": "bf16"}),
        (1, {"num_classes": 2000, "embedding_dim": 512, "batch_size": 16_384}),
        (1, {"num_classes": 5_000_000, "embedding_dim": 8, "sample_rate": 0.01}),
        (2, {"num_classes": 400_000, "embedding_dim": 256, "sample_rate": 0.2}),
        (1, {"num_classes": 200_000, "embedding_dim": 256, "saved_logits_bytes": 40_000_000}),
        (
            1,
            {"num_classes": 400_000, "embedding_dim": 256, "sample_rate": 0.4, "sparse_grad": True}
            | {"optimizer": "sparse_adamw"},
        ),
        (1, {"num_classes": 300_000, "embedding_dim": 256, "optimizer": "sparse_sgd"} | FUSED | LARGE_TILES),
        (
            1,
            {"num_classes": 400_000, "embedding_dim": 256, "sample_rate": 0.4, "optimizer": "sparse_momentum"}
            | FUSED
            | LARGE_TILES,
        ),
        (1, {"num_classes": 300_000, "embedding_dim": 256, "optimizer": "sparse_adamw"} | FUSED | LARGE_TILES),
        (
            1,
            {"num_classes": 800_000, "embedding_dim": 64, "batch_size": 128, "sample_rate": 0.5, "dtype": "bf16"}
            | {"optimizer": "sparse_adamw", "saved_logits_bytes": 180_000_000}
            | FUSED,
        ),
    ],
    ids=str,
)
def test_memory_is_that_of_a_real_step(
    world_size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak beyond what a step finds in place, which is the part that is not plain arithmetic, within 3 %."""
    options = {"batch_size": 64} | dense(options)
    tile_elements = options.pop("tile_elements", _tiles.TILE_ELEMENTS)
    monkeypatch.setattr(_tiles, "TILE_ELEMENTS", tile_elements)
    found = plan(ranks=world_size, **options)
    try:
        measured = run_ranks(world_size, measured_bytes, options, tile_elements)[0]
    finally:
        close_pool()  # of workers whose allocator is now another
    assert measured["weight"] == found.weight_bytes
    assert measured["optimizer"] == found.optimizer_bytes
    assert measured["gradient"] == found.gradient_bytes
    inputs = options["batch_size"] * (options["embedding_dim"] * DTYPES[options.get("dtype", "fp32")].itemsize + 8)
    growth = found.peak_bytes - found.weight_bytes - found.optimizer_bytes - inputs
    assert growth > 150e6  # large enough for the noise not to matter
    assert growth == pytest.approx(measured["growth"], rel=0.03)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 1_000_000, "embedding_dim": 512},
        {"num_classes": 2_000_000, "embedding_dim": 512, "dtype": "bf16", "optimizer": "adamw"},
        {"num_classes": 2_000_000, "embedding_dim": 512, "sample_rate": 0.3, "sparse_grad": True},
        {"num_classes": 2_000_000, "embedding_dim": 512, "dtype": "bf16", "saved_logits_bytes": 2_000_000_000},
        {"num_classes": 2_000_000, "embedding_dim": 512, "sample_rate": 0.3, "sparse_grad": True}
        | {"optimizer": "sparse_momentum"},
        {"num_classes": 2_000_000, "embedding_dim": 512, "sample_rate": 0.3, "optimizer": "sparse_adamw"} | FUSED,
    ],
    ids=str,
)
def test_memory_is_that_of_a_real_step_on_cuda(options: dict[str, Any]) -> None:
    options = {"batch_size": 512} | dense(options)
    before = torch.cuda.memory_allocated()
    head, optimizer, embeddings, labels = make(options, "cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        head(embeddings, labels).backward()
        optimizer.step()
        measured = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
        embeddings.grad = None
    assert plan(device="cuda", **options).peak_bytes == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_grad": True},
        {"sparse_grad": True, "saved_logits_bytes": 10_000},
        {"optimizer": "sparse_adamw", "saved_logits_bytes": 1 << 20} | FUSED,
    ],
    ids=str,
)
def test_activations_are_what_forward_leaves(options: dict[str, Any]) -> None:
    """Autograd's saved tensors of a real forward and the loss, weight and state aside, each storage once."""
    options = {"num_classes": 5000, "embedding_dim": 32, "batch_size": 16, "sample_rate": 0.1} | options
    head, optimizer, embeddings, labels = make(options)
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in (embeddings, labels)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = head(embeddings, labels)
    keep(loss)
    for tensor in (head.weight, *(value for state in optimizer.state.values() for value in state.values())):
        del storages[tensor.untyped_storage()._cdata]
    assert plan(**options).activation_bytes == sum(t.untyped_storage().nbytes() for t in storages.values())


@pytest.mark.parametrize("tile", [125, 63, 62, 32, 31, 25, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"sparse_grad": False},
        {"sparse_grad": True},
        {"saved_logits_bytes": 90 * 33 * 4},
        {"saved_logits_bytes": 30 * 33 * 4, "optimizer": "sparse_adamw"},
        {"saved_logits_bytes": 1 << 20, "optimizer": "sparse_adamw"} | FUSED,
        {"saved_logits_bytes": 70 * 33 * 4, "optimizer": "sparse_momentum", "sample_rate": 1.0} | FUSED,
    ],
    ids=str,
)
def test_every_tile_counts(tile: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few iterations of a loop are traced, but the plan is that of all of them."""
    monkeypatch.setattr(_tiles, "TILE_ELEMENTS", 32 * tile)
    monkeypatch.setattr(sample, "_BLOCK", 40)
    sizes: dict[str, Any] = {"num_classes": 1000, "embedding_dim": 16, "ranks": 4, "batch_size": 8, "sample_rate": 0.5}
    sizes |= options
    short = plan(**sizes)
    monkeypatch.setattr(_kernels, "_num_skipped", lambda total, step: 0)
    assert short == plan(**sizes)
    num_sampled = int(250 * sizes["sample_rate"])
    num_saved = min(sizes.get("saved_logits_bytes", 0) // (33 * 4), num_sampled)
    assert short.forward.matmul_flops == 2 * num_sampled * 32 * 16
    assert short.backward.matmul_flops == 2 * (3 * num_sampled - num_saved) * 32 * 16


def test_the_peak_is_the_largest_of_the_phases() -> None:
    found = plan(100_000, 64, optimizer="adamw")
    assert found.peak_bytes == found.update.peak_bytes > found.backward.peak_bytes > found.forward.peak_bytes
    assert found.optimizer_bytes == 2 * found.weight_bytes + 4  # two moments and the count of steps


def test_cuda_has_larger_tiles() -> None:
    sizes: dict[str, Any] = {"num_classes": 2_000_000, "embedding_dim": 64, "dtype": "bf16"}
    cpu, cuda = plan(**sizes), plan(device="cuda", **sizes)
    assert cuda.peak_bytes > cpu.peak_bytes + 4 * (_tiles.ACCELERATOR_TILE_ELEMENTS - _tiles.TILE_ELEMENTS)
    assert (cuda.forward.matmul_flops, cuda.backward.matmul_flops) == (
        2 * 2_000_000 * 128 * 64,
        6 * 2_000_000 * 128 * 64,
    )


def test_cuda_samples_a_shard_in_one_piece() -> None:
    sizes: dict[str, Any] = {"num_classes": 20_000_000, "embedding_dim": 1, "sample_rate": 0.001}
    cpu, cuda = (plan(device=device, **sizes).forward.peak_bytes for device in ("cpu", "cuda"))
    assert cuda == pytest.approx((4 + 2 * 8) * 20e6, rel=0.01)  # the weight, and two int64 to a class at a time
    assert cpu < (4 + 1) * 20e6


def test_a_fused_step_has_no_gradient_and_no_update() -> None:
    sizes: dict[str, Any] = {"num_classes": 100_000, "embedding_dim": 64, "optimizer": "sparse_adamw"}
    fused, found = plan(fused=True, **sizes), plan(**sizes)
    assert fused.optimizer_bytes == found.optimizer_bytes == 2 * found.weight_bytes + 4
    assert (fused.gradient_bytes, fused.sparse_grad) == (0, False)
    assert (fused.update.matmul_flops, fused.update.collectives) == (0, ())
    assert fused.update.peak_bytes < fused.backward.peak_bytes < found.backward.peak_bytes


def test_the_librarys_optimizers_take_sparse_gradients_where_classes_are_sampled() -> None:
    for optimizer in ("sgd", "momentum", "adamw", "sparse_sgd", "sparse_momentum", "sparse_adamw"):
        takes_sparse = optimizer == "sgd" or optimizer.startswith("sparse")
        assert plan(1000, 8, sample_rate=0.1, optimizer=optimizer).sparse_grad == takes_sparse
        assert not plan(1000, 8, optimizer=optimizer).sparse_grad


def plan_between_collectives() -> tuple[Plan, float]:
    state = torch.get_rng_state()
    found = plan(1000, 8, ranks=64, sample_rate=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    total = torch.ones(())
    dist.all_reduce(total)
    return found, float(total)


def test_a_live_group_is_left_alone() -> None:
    expected = plan(1000, 8, ranks=64, sample_rate=0.1)
    assert not dist.is_initialized()
    assert run_ranks(2, plan_between_collectives) == [(expected, 2.0)] * 2
