"""Checkpoints of whole runs: a backbone beside the head, schedules and scalers, groups that are not the world."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from .inputs import group_rank
from .ranks import run_ranks


class Run:
    """A whole training run of a backbone, wrapped as `wrap` says, one optimizer for it and the head, and a schedule."""

    def __init__(self, wrap: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.head = torch_pfc.PartialFC(4, 5, scale=8.0)
        backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.backbone: Any = backbone
        if wrap == "ddp":
            self.backbone = DistributedDataParallel(backbone)
        elif wrap == "fsdp":
            self.backbone = fully_shard(backbone, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        parameters = [*self.backbone.parameters(), self.head.weight]
        self.optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.1))
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (1 + seed))

    def others(self) -> dict[str, Any]:
        return {"backbone": self.backbone, "schedule": self.schedule, "scaler": self.scaler}

    def step(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 10 * group_rank())
        x, labels = torch.randn(4, 3, generator=generator), torch.randint(5, (4,), generator=generator)
        self.optimizer.zero_grad()
        loss: Tensor = self.head(self.backbone(x), labels)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def whole_state(self) -> dict[str, Tensor]:
        """Every tensor of backbone and optimizer in full; the shard of the head and its state as they are."""
        tensors = dict(self.backbone.state_dict()) | {"head": self.head.weight.detach().clone()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{key}": value for key, value in state.items()}
        return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in tensors.items()}


def save_run(path: str, wrap: str) -> tuple[Any, ...]:
    run = Run(wrap, seed=0)
    run.step(seed=1)
    run.step(seed=2)
    torch_pfc.checkpoint.save(path, run.head, run.optimizer, others=run.others())
    return run.whole_state(), run.schedule.state_dict(), run.scaler.get_scale(), run.step(seed=3)


def load_run(path: str, wrap: str) -> tuple[Any, ...]:
    run = Run(wrap, seed=1)
    torch_pfc.checkpoint.load(path, run.head, run.optimizer, others=run.others())
    return run.whole_state(), run.schedule.state_dict(), run.scaler.get_scale(), run.step(seed=3)


@pytest.mark.parametrize("wrap, saved_at, loaded_at", [("ddp", 2, 2), ("ddp", 2, 3), ("fsdp", 2, 2), ("fsdp", 3, 2)])
def test_a_whole_run_starts_again(tmp_path, wrap, saved_at, loaded_at):
    before = run_ranks(saved_at, save_run, str(tmp_path / "run"), wrap)
    after = run_ranks(loaded_at, load_run, str(tmp_path / "run"), wrap)
    whole_before, whole_after = before[0][0], after[0][0]
    position = len([n for n in whole_before if n.endswith((".weight", ".bias"))])
    split = {"head", f"{position}.exp_avg", f"{position}.exp_avg_sq"}
    assert split < whole_before.keys() == whole_after.keys()
    for name in whole_before:
        ours, theirs = ([rank[0][name] for rank in side] for side in (after, before))
        if name in split:
            assert torch.equal(torch.cat(ours), torch.cat(theirs)), name
        else:
            assert all(torch.equal(value, theirs[0]) for value in ours), name
    _, schedule, scale, loss = after[0]
    assert schedule == before[0][1] and isinstance(schedule["milestones"], Counter) and scale == before[0][2]
    if saved_at == loaded_at:
        assert torch.equal(loss, before[0][3])


def sharded_backbone(path: str, saves: bool) -> list[Tensor]:
    """A fully sharded backbone whose optimizer is its own: its state in full after the save, or after the load."""
    torch.manual_seed(0 if saves else 1)
    head = torch_pfc.PartialFC(4, 5)
    backbone: Any = fully_shard(nn.Linear(3, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(backbone.parameters())
    others = {"backbone": backbone, "backbone's optimizer": optimizer}
    if saves:
        head(backbone(torch.randn(4, 3)), torch.arange(4)).backward()
        optimizer.step()
        torch_pfc.checkpoint.save(path, head, others=others)
    else:
        torch_pfc.checkpoint.load(path, head, others=others)
    state = [optimizer.state[p][key] for p in backbone.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [value.full_tensor() for value in (*backbone.parameters(), *state)]


def test_an_optimizer_of_the_backbones_alone_that_has_made_no_step(tmp_path):
    before, *_ = run_ranks(3, sharded_backbone, str(tmp_path / "run"), True)
    for after in run_ranks(2, sharded_backbone, str(tmp_path / "run"), False):
        assert all(torch.equal(*pair) for pair in zip(after, before, strict=True)) and all(v.any() for v in after)
    other = torch.optim.AdamW(nn.Linear(3, 4, bias=False).parameters())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, got groups of \[2\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", torch_pfc.PartialFC(4, 5), others={"backbone's optimizer": other})


def save_and_load_by_group(path: str) -> list[tuple[str, bool]]:
    """Ranks {0, 1} and {2, 3} each have a head and a checkpoint of their own."""
    results: list[tuple[str, bool]] = []
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    torch.manual_seed(half)
    head = torch_pfc.PartialFC(3, 5, group=groups[half])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    head(torch.randn(4, 3), torch.arange(4)).backward()
    optimizer.step()
    torch_pfc.checkpoint.save(f"{path}{half}", head, optimizer)
    torch_pfc.checkpoint.async_save(f"{path}async{half}", head, optimizer).result()
    for name in (f"{path}{half}", f"{path}async{half}"):
        fresh = torch_pfc.PartialFC(3, 5, group=groups[half])
        restored = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
        torch_pfc.checkpoint.load(name, fresh, restored)
        momentum = [o.state[h.weight]["momentum_buffer"] for o, h in ((restored, fresh), (optimizer, head))]
        results.append((name, torch.equal(fresh.weight, head.weight) and torch.equal(*momentum)))
    dist.barrier()
    whole = torch_pfc.PartialFC(3, 5)  # over all four: what the other half saved
    torch_pfc.checkpoint.load(f"{path}1", whole)
    gathered, ours = torch_pfc.gather_weight(head), torch_pfc.gather_weight(whole)
    if gathered is not None and dist.get_rank() == 2:
        dist.send(gathered, 0)
    if gathered is not None and ours is not None:
        dist.recv(other := torch.empty_like(ours), 2)
        results.append(("the other half's", torch.equal(ours, other) and not torch.equal(gathered, other)))
    return results


def test_groups_that_are_not_the_world_have_checkpoints_of_their_own(tmp_path):
    results = run_ranks(4, save_and_load_by_group, str(tmp_path / "run"))
    assert [len(r) for r in results] == [3, 2, 2, 2]
    assert all(equal for _, equal in itertools.chain(*results)), results
