"""Saving beside the training: what was staged is what is written, and a failure is the future's."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import torch_pfc
from torch_pfc.checkpoint import async_save, load, save

from .inputs import error_of
from .ranks import run_ranks


def trained(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    head = torch_pfc.PartialFC(3, 5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    step(head, optimizer)
    return head, optimizer


def step(head: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    head(torch.randn(4, 3), torch.arange(4)).backward()
    optimizer.step()


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written until the event is set."""
    write_data, go = FileSystemWriter.write_data, threading.Event()

    def waiting(self: Any, plan: Any, planner: Any) -> Any:
        assert go.wait(30)
        return write_data(self, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", waiting):
        yield go


def train_while_saving(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    head, optimizer = trained()
    backbone = nn.Linear(2, 2)
    before = head.weight.detach().clone(), optimizer.state[head.weight]["momentum_buffer"].clone()
    with held_back() as go:
        future = async_save(path, head, optimizer, others={"backbone": backbone})
        for _ in range(5):
            step(head, optimizer)
        nn.init.zeros_(backbone.weight)
        assert not future.done() and not Path(path).exists()
        go.set()
        for _ in range(20):
            step(head, optimizer)
        assert future.result(30) is None
    assert head.weight.numel() == 0 or not torch.equal(head.weight, before[0])
    return before


def load_again(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    head, optimizer = trained(seed=1)
    backbone = nn.Linear(2, 2)
    load(path, head, optimizer, others={"backbone": backbone})
    assert backbone.weight.any()
    return head.weight.detach(), optimizer.state[head.weight]["momentum_buffer"]


@pytest.mark.parametrize("saved_at, loaded_at", [(1, 2), (3, 2), (4, 3)])
def test_training_goes_on_while_it_saves_what_was(tmp_path, saved_at, loaded_at):
    before = run_ranks(saved_at, train_while_saving, str(tmp_path / "run"))
    after = run_ranks(loaded_at, load_again, str(tmp_path / "run"))
    for ours, theirs in zip(zip(*after, strict=True), zip(*before, strict=True), strict=True):
        assert torch.equal(torch.cat(ours), torch.cat(theirs))


def test_without_a_process_group(tmp_path):
    weight, _ = train_while_saving(str(tmp_path / "run"))
    assert torch.equal(load_again(str(tmp_path / "run"))[0], weight)


def test_one_at_a_time(tmp_path):
    head, optimizer = trained()
    for second in (
        lambda: async_save(tmp_path / "run", head, optimizer),
        lambda: save(tmp_path / "run", head, optimizer),
        lambda: load(tmp_path / "run", head, optimizer),
    ):
        with held_back() as go:
            first = async_save(tmp_path / "run", head, optimizer)
            threading.Timer(0.1, go.set).start()
            result = second()
            assert first.done()
        if result is not None:
            result.result(30)


def fail_beside(path: str) -> tuple[tuple[str, str], torch.Tensor]:
    head, optimizer = trained()
    save(path, head, optimizer)
    before = head.weight.detach().clone()
    step(head, optimizer)

    def failing(self: Any, plan: Any, planner: Any) -> Any:
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("No space left on device")
        return write_data(self, plan, planner)

    write_data = FileSystemWriter.write_data
    with mock.patch.object(FileSystemWriter, "write_data", failing):
        error = error_of(async_save(path, head, optimizer).result)
    load(path, head)
    assert torch.equal(head.weight, before)
    async_save(path, head, optimizer).result(30)
    return error, before


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_future_raises_what_failed_and_the_old_one_stays(tmp_path, world_size):
    for (kind, message), _ in run_ranks(world_size, fail_beside, str(tmp_path / "run")):
        assert kind == "RuntimeError" and message == f"rank {world_size - 1}: OSError: No space left on device"


def without_gloo(path: str) -> tuple[str, str]:
    group = dist.new_group([0, 1])  # the world's may have been made its companion by a test before
    with mock.patch.object(dist, "is_gloo_available", return_value=False):
        return error_of(lambda: async_save(path, torch_pfc.PartialFC(3, 5, group=group)))


def test_without_gloo_it_says_so(tmp_path):
    for kind, message in run_ranks(2, without_gloo, str(tmp_path / "run")):
        assert kind == "RuntimeError" and "gloo must be available" in message


@pytest.mark.cuda
def test_the_host_has_a_copy_of_what_is_on_the_device(tmp_path):
    torch.manual_seed(0)
    head = torch_pfc.PartialFC(3, 5, device="cuda")
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, fused=True)
    head(torch.randn(4, 3, device="cuda"), torch.arange(4, device="cuda")).backward()
    optimizer.step()
    before = head.weight.detach().clone()
    future = async_save(tmp_path / "run", head, optimizer)
    nn.init.zeros_(head.weight)
    future.result(30)
    fresh = torch_pfc.PartialFC(3, 5, device="cuda")
    restored = torch.optim.AdamW(fresh.parameters(), lr=0.1, fused=True)
    load(tmp_path / "run", fresh, restored)
    assert torch.equal(fresh.weight, before)
    for key, value in optimizer.state[head.weight].items():
        assert torch.equal(restored.state[fresh.weight][key], value) and restored.state[fresh.weight][key].is_cuda
