"""The whole weight on one rank or in a file, without a second copy of it."""

import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_pfc
from torch_pfc import _gather_weight

from .inputs import error_of, group_rank
from .ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def whole(num_classes: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(0)).to(dtype)


def head_of(weight: Tensor, **options: Any) -> Any:
    num_classes, dim = weight.shape
    head = torch_pfc.PartialFC(dim, num_classes, dtype=weight.dtype, **options)
    with torch.no_grad():
        head.weight.copy_(weight[head.class_start :][: head.num_local_classes])
    return head


def gather(num_classes: int, dim: int, dtype: torch.dtype, path: str | None, tile: int) -> Tensor | None:
    with mock.patch.object(_gather_weight, "TILE_ELEMENTS", tile):
        gathered: Tensor | None = torch_pfc.gather_weight(head_of(whole(num_classes, dim, dtype)), path)
    return gathered


@pytest.mark.parametrize("tile", [1, 10, 1 << 20])
@pytest.mark.parametrize("num_classes", [1, 5, 13])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rank_0_gets_every_row_in_order(world_size, num_classes, tile):
    dtype = DTYPES[num_classes % 4]
    first, *rest = run_ranks(world_size, gather, num_classes, 4, dtype, None, tile)
    assert torch.equal(first, whole(num_classes, 4, dtype)) and first.dtype == dtype
    assert rest == [None] * (world_size - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [0, 3])
def test_safetensors_reads_the_file(tmp_path, world_size, dtype):
    path = tmp_path / "centres.safetensors"
    path.write_text("an old one")
    arguments = (7, 5, dtype, str(path), 10)
    assert (run_ranks(world_size, gather, *arguments) if world_size else [gather(*arguments)]) == [None] * max(
        1, world_size
    )
    tensors = load_file(path)
    assert tensors.keys() == {"weight"}
    assert torch.equal(tensors["weight"], whole(7, 5, dtype)) and tensors["weight"].dtype == dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "num_classes": "7", "embedding_dim": "5"}
    assert os.listdir(tmp_path) == ["centres.safetensors"]


class Allocations(TorchDispatchMode):
    """Sums up what is allocated, and never freed as long as the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            storage = output.untyped_storage()
            if storage.data_ptr() not in before:
                self.storages[storage.data_ptr()] = storage
        return output


def count_allocations(path: str | None) -> int:
    head = head_of(whole(1000, 8, torch.float32))
    with mock.patch.object(_gather_weight, "TILE_ELEMENTS", 80), Allocations() as allocations:
        torch_pfc.gather_weight(head, path)
    return sum(storage.nbytes() for storage in allocations.storages.values())


@pytest.mark.parametrize("world_size", [1, 3])
def test_there_is_the_result_and_one_tile(tmp_path, world_size):
    tile = 320 if world_size > 1 else 0
    assert run_ranks(world_size, count_allocations, None) == [32000 + tile] + [0] * (world_size - 1)
    in_file = run_ranks(world_size, count_allocations, str(tmp_path / "file"))
    assert in_file == [tile] + [0] * (world_size - 1)


def fail_to_write(path: str) -> list[tuple[str, str]]:
    head = head_of(whole(3000, 40, torch.float32))
    elsewhere = str(Path(path).parent / "missing" / "file")
    errors = [error_of(lambda: torch_pfc.gather_weight(head, elsewhere))]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if group_rank() == 0:  # the disk is full in the middle of the second rank's rows
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, unlimited[1]))
        with mock.patch.object(_gather_weight, "TILE_ELEMENTS", 4000):
            errors.append(error_of(lambda: torch_pfc.gather_weight(head, path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    torch_pfc.gather_weight(head, path + ".next")
    return errors


def test_what_fails_on_rank_0_raises_everywhere_and_leaves_the_old_file(tmp_path):
    (tmp_path / "file").write_text("an old one")
    first, *rest = run_ranks(3, fail_to_write, str(tmp_path / "file"))
    assert [kind for kind, _ in first] == ["FileNotFoundError", "OSError"] and "File too large" in first[1][1]
    for missing, too_large in rest:
        assert missing[0] == too_large[0] == "RuntimeError"
        assert missing[1].startswith("on rank 0 of 3: FileNotFoundError: ") and "File too large" in too_large[1]
    assert (tmp_path / "file").read_text() == "an old one"
    assert sorted(os.listdir(tmp_path)) == ["file", "file.next"]
    assert torch.equal(load_file(tmp_path / "file.next")["weight"], whole(3000, 40, torch.float32))


def test_a_dtype_that_files_do_not_have_is_refused(tmp_path):
    head = torch_pfc.PartialFC(4, 5)
    head.weight = torch.nn.Parameter(torch.zeros(5, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"for a file, got torch.complex64"):
        torch_pfc.gather_weight(head, tmp_path / "file")


def gather_in_halves() -> tuple[int, Tensor | None]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = dist.get_rank() % 2
    return half, torch_pfc.gather_weight(head_of(whole(5 + half, 3, torch.float32), group=groups[half]))


def test_the_first_rank_of_a_group_may_be_another_one_of_the_world():
    for rank, (half, gathered) in enumerate(run_ranks(4, gather_in_halves)):
        if rank < 2:
            assert torch.equal(gathered, whole(5 + half, 3, torch.float32))
        else:
            assert gathered is None


@pytest.mark.cuda
def test_rows_come_from_the_device(tmp_path):
    weight = whole(7, 5, torch.bfloat16)
    head = head_of(weight).to("cuda")
    gathered = torch_pfc.gather_weight(head)
    assert gathered is not None and not gathered.is_cuda and torch.equal(gathered, weight)
    torch_pfc.gather_weight(head, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["weight"], weight)
