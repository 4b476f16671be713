"""Saved at one number of ranks, loaded at another: the weight, the optimizer and the step after it."""

import copy
import itertools
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from .inputs import error_of, even, group_rank, my_rows, random_batch
from .ranks import run_ranks

NUM_ROWS, DIM = 12, 3
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
    "sparse_sgd": lambda parameters: torch_pfc.optim.SparseSGD(parameters, lr=0.1, momentum=0.9),
    "sparse_adamw": lambda parameters: torch_pfc.optim.SparseAdamW(parameters, lr=0.1),
}


@dataclass
class Found:
    """What a rank holds: its shard, the optimizer's state of it, and the loss of the step after."""

    weight: Tensor
    state: dict[str, Any]
    lr: float
    loss: Tensor


def make(num_classes: int, kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    margin = torch_pfc.CosFace(0.2)
    head = torch_pfc.PartialFC(
        DIM, num_classes, margin=margin, scale=8.0, dtype=dtype, sparse_grad=kind.startswith("sparse")
    )
    return head, OPTIMIZERS[kind](head.parameters())


def step(head: Any, optimizer: Any, seed: int) -> Tensor:
    batch = random_batch(NUM_ROWS, head.num_classes, DIM, scale=1.0, seed=seed)
    counts = even(NUM_ROWS, head.group.size)
    optimizer.zero_grad()
    embeddings = my_rows(batch.embeddings, counts).to(torch.promote_types(head.weight.dtype, torch.float32))
    loss: Tensor = head(embeddings, my_rows(batch.labels, counts))
    loss.backward()
    optimizer.step()
    return loss.detach()


def found(head: Any, optimizer: Any) -> Found:
    state = copy.deepcopy(dict(optimizer.state[head.weight]))
    return Found(head.weight.detach().clone(), state, optimizer.param_groups[0]["lr"], step(head, optimizer, seed=99))


def train_and_save(path: str, num_classes: int, kind: str, dtype: torch.dtype = torch.float64) -> Found:
    head, optimizer = make(num_classes, kind, dtype)
    step(head, optimizer, seed=1)
    step(head, optimizer, seed=2)
    optimizer.param_groups[0]["lr"] = 0.05
    torch_pfc.checkpoint.save(path, head, optimizer)
    return found(head, optimizer)


def load_fresh(path: str, num_classes: int, kind: str, dtype: torch.dtype = torch.float64) -> Found:
    head, optimizer = make(num_classes, kind, dtype, seed=1)
    torch_pfc.checkpoint.load(path, head, optimizer)
    return found(head, optimizer)


def on(world_size: int, job: Any, *args: Any) -> list[Any]:
    """0 ranks: this process without a process group."""
    return [job(*args)] if world_size == 0 else run_ranks(world_size, job, *args)


def assert_same(before: list[Found], after: list[Found]) -> None:
    assert torch.equal(torch.cat([f.weight for f in after]), torch.cat([f.weight for f in before]))
    for key, value in before[0].state.items():
        if isinstance(value, Tensor) and value.dim():
            assert torch.equal(torch.cat([f.state[key] for f in after]), torch.cat([f.state[key] for f in before])), key
            assert all(f.state[key].dtype == value.dtype for f in after)
        else:
            assert all(f.state[key] == value for f in after), key
    assert all(f.state.keys() == before[0].state.keys() and f.lr == 0.05 for f in after)
    for f in after:
        if len(before) == len(after):
            assert torch.equal(f.loss, before[0].loss)
        torch.testing.assert_close(f.loss, before[0].loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_classes, kind", [(5, "adamw"), (7, "momentum")])
@pytest.mark.parametrize("saved_at", range(5))
def test_any_number_of_ranks_to_any_other(tmp_path, num_classes, kind, saved_at):
    before = on(saved_at, train_and_save, str(tmp_path / "run"), num_classes, kind)
    for loaded_at in range(5):
        assert_same(before, on(loaded_at, load_fresh, str(tmp_path / "run"), num_classes, kind))


@pytest.mark.parametrize("saved_at, loaded_at", [(4, 3), (2, 4)])
@pytest.mark.parametrize("kind", ["adagrad", "sparse_adam", "sparse_sgd", "sparse_adamw"])
def test_other_optimizers(tmp_path, kind, saved_at, loaded_at):
    before = on(saved_at, train_and_save, str(tmp_path / "run"), 5, kind)
    assert_same(before, on(loaded_at, load_fresh, str(tmp_path / "run"), 5, kind))


@pytest.mark.parametrize("world_sizes", [(3, 4), (1, 2)])
def test_bfloat16_stays_bit_equal(tmp_path, world_sizes):
    before, after = (
        on(world_size, job, str(tmp_path / "run"), 3, "adamw", torch.bfloat16)
        for world_size, job in zip(world_sizes, (train_and_save, load_fresh), strict=True)
    )
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        ours, theirs = (
            torch.cat([f.weight if name == "weight" else f.state[name] for f in side]) for side in (after, before)
        )
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def test_another_dtype_is_cast(tmp_path):
    (before,) = on(0, train_and_save, str(tmp_path / "run"), 5, "adamw")
    head, optimizer = make(5, "adamw", torch.float32)
    torch_pfc.checkpoint.load(tmp_path / "run", head, optimizer)
    assert torch.equal(head.weight, before.weight.float())
    assert torch.equal(optimizer.state[head.weight]["exp_avg"], before.state["exp_avg"].float())


def test_pb_19_another_number_of_classes_is_refused_naming_both(tmp_path):
    torch_pfc.checkpoint.save(tmp_path / "run", torch_pfc.PartialFC(2, 91180))
    head = torch_pfc.PartialFC(2, 93431)
    before = head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"head's 93431 classes of width 2, got 91180 classes of width 2"):
        torch_pfc.checkpoint.load(tmp_path / "run", head)
    with pytest.raises(ValueError, match=r"head's 91180 classes of width 4, got 91180 classes of width 2"):
        torch_pfc.checkpoint.load(tmp_path / "run", torch_pfc.PartialFC(4, 91180))
    assert torch.equal(head.weight, before)


def refuse_other_sizes(path: str) -> tuple[tuple[str, str], bool]:
    head, optimizer = make(7, "adamw")
    step(head, optimizer, seed=1)
    before = copy.deepcopy((head.state_dict(), optimizer.state_dict()["state"]))
    error = error_of(lambda: torch_pfc.checkpoint.load(path, head, optimizer))
    after = (head.state_dict(), optimizer.state_dict()["state"])
    return error, str(before) == str(after)


def test_every_rank_refuses_another_number_of_classes(tmp_path):
    on(3, train_and_save, str(tmp_path / "run"), 5, "adamw")
    for (kind, message), unchanged in run_ranks(4, refuse_other_sizes, str(tmp_path / "run")):
        assert kind == "ValueError" and "7 classes of width 3, got 5 classes of width 3" in message
        assert unchanged


def test_a_scale_and_a_margin_with_state_come_along(tmp_path):
    class Learned(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.m = nn.Parameter(torch.tensor(value))
            self.register_buffer("seen", torch.tensor([value]))

        def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
            return cosine - self.m

    def head(value: float) -> Any:
        return torch_pfc.PartialFC(4, 6, scale=nn.Parameter(torch.tensor(value)), margin=Learned(value))

    torch_pfc.checkpoint.save(tmp_path / "run", saved := head(0.25))
    torch_pfc.checkpoint.load(tmp_path / "run", loaded := head(0.5))
    assert loaded.scale == 0.25 and loaded.margin.m == 0.25 and loaded.margin.seen == 0.25
    assert torch.equal(loaded.weight, saved.weight)
    plain = torch_pfc.PartialFC(4, 6)
    with pytest.raises(ValueError, match=r"entries \['weight'\], got \['margin.m', 'margin.seen', 'scale', 'weight'\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", plain)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path):
    head, optimizer = make(5, "adamw")
    torch_pfc.checkpoint.save(tmp_path / "bare", head)
    with pytest.raises(ValueError, match="must hold an optimizer to load one, but was saved without"):
        torch_pfc.checkpoint.load(tmp_path / "bare", head, optimizer)
    torch_pfc.checkpoint.save(tmp_path / "run", head, optimizer)
    torch_pfc.checkpoint.load(tmp_path / "run", head)  # the head alone is fine
    other = nn.Linear(2, 2)
    wider = torch.optim.AdamW([head.weight, *other.parameters()])
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, got groups of \[1\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", head, wider)
    torch_pfc.checkpoint.save(tmp_path / "wider", head, wider)
    moved = torch.optim.AdamW([*other.parameters(), head.weight])
    with pytest.raises(ValueError, match="optimizer's position 2, got 0"):
        torch_pfc.checkpoint.load(tmp_path / "wider", head, moved)


def test_state_that_is_not_by_class_is_refused(tmp_path):
    head = torch_pfc.PartialFC(4, 6)
    optimizer = torch.optim.Adafactor(head.parameters())
    step_once(head, optimizer)
    with pytest.raises(ValueError, match=r"got row_var of \[6, 1\] for a weight of \[6, 4\]"):
        torch_pfc.checkpoint.save(tmp_path / "run", head, optimizer)
    assert not (tmp_path / "run").exists()


def step_once(head: Any, optimizer: Any) -> None:
    head(torch.randn(5, head.embedding_dim), torch.arange(5) % head.num_classes).backward()
    optimizer.step()


def test_what_is_the_same_on_every_rank_must_hold_no_shard(tmp_path):
    head, second = torch_pfc.PartialFC(4, 6), torch_pfc.PartialFC(4, 6)
    optimizer = torch.optim.AdamW([*head.parameters(), *second.parameters()])
    for position, own in enumerate((second, head)):
        with pytest.raises(ValueError, match=f"shard of this head alone, got another as parameter {position}"):
            torch_pfc.checkpoint.save(tmp_path / "run", own, optimizer)
    for name, other in {"model": nn.Sequential(second), "optimizer": torch.optim.SGD(head.parameters())}.items():
        with pytest.raises(ValueError, match=rf"others\['{name}'\] must be the same on every rank"):
            torch_pfc.checkpoint.save(tmp_path / "run", head, others={name: other})
    with pytest.raises(TypeError, match=r"others\['step'\] must have state_dict and load_state_dict, got a int"):
        torch_pfc.checkpoint.save(tmp_path / "run", head, others={"step": 3})
    torch_pfc.checkpoint.save(tmp_path / "run", head, others={"backbone": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"must hold the others \['model'\], got \['backbone'\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", head, others={"model": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"others.backbone.weight of .* must be \[3, 2\], got \[2, 2\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", head, others={"backbone": nn.Linear(2, 3)})
    with pytest.raises(ValueError, match=r"entries of the one given, but not \['bias'\]"):
        torch_pfc.checkpoint.load(tmp_path / "run", head, others={"backbone": nn.Linear(2, 2, bias=False)})


def test_the_head_is_the_last_to_change(tmp_path):
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"epoch": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError(state["epoch"])

    torch_pfc.checkpoint.save(tmp_path / "run", *make(5, "adamw"), others={"picky": Picky()})
    head, optimizer = make(5, "adamw", seed=1)
    before = head.weight.detach().clone()
    with pytest.raises(KeyError, match="3"):
        torch_pfc.checkpoint.load(tmp_path / "run", head, optimizer, others={"picky": Picky()})
    assert torch.equal(head.weight, before) and not optimizer.state


def test_only_a_head_is_taken_for_one(tmp_path):
    compiled: Any = torch.compile(torch_pfc.PartialFC(3, 5), backend="eager")
    with pytest.raises(TypeError, match="head must be a PartialFC, itself and not what it is compiled"):
        torch_pfc.checkpoint.save(tmp_path / "run", compiled)


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


def test_a_dcp_tool_reads_it(tmp_path):
    before = on(3, train_and_save, str(tmp_path / "run"), 5, "adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=False)
    assert torch.equal(saved["head.weight"], torch.cat([f.weight for f in before]))
    assert torch.equal(saved["optimizer.state.0.exp_avg"], torch.cat([f.state["exp_avg"] for f in before]))


def own_call(path: str, saves: bool) -> tuple[Tensor, Tensor]:
    """A head's state beside a backbone's in a caller's own DCP call."""
    torch.manual_seed(0 if saves else 1)
    head, backbone = torch_pfc.PartialFC(3, 5), nn.Linear(2, 3)
    state = {"model": backbone.state_dict(), **head.sharded_state_dict("head.")}
    if saves:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
    return head.weight.detach(), backbone.weight.detach()


def test_a_callers_own_dcp_call_reads_into_the_head_in_place(tmp_path):
    before = run_ranks(3, own_call, str(tmp_path / "run"), True)
    after = run_ranks(2, own_call, str(tmp_path / "run"), False)
    assert torch.equal(torch.cat([w for w, _ in after]), torch.cat([w for w, _ in before]))
    assert all(torch.equal(b, before[0][1]) for _, b in after)


def copy_in() -> list[tuple[str, str]]:
    torch.manual_seed(0)
    source = torch_pfc.PartialFC(3, 5)
    whole = torch.arange(15.0).view(5, 3)
    target = torch_pfc.PartialFC(3, 5)
    target.load_sharded_state_dict({**source.sharded_state_dict("a."), "backbone.weight": whole}, "a.")
    assert torch.equal(target.weight, source.weight)
    target.load_sharded_state_dict({"weight": whole})
    assert torch.equal(target.weight, whole[target.class_start :][: target.num_local_classes])
    wrong = [
        {"weight": torch.zeros(6, 3)},
        torch_pfc.PartialFC(4, 5).sharded_state_dict(),
        {"weight": whole, "scale": torch.tensor(1.0)},
        {"bias": whole},
    ]
    before = target.weight.detach().clone()
    errors = [error_of(partial(target.load_sharded_state_dict, state)) for state in wrong]
    assert torch.equal(target.weight, before)
    return errors


@pytest.mark.parametrize("world_size", [0, 1, 2, 4])
def test_load_sharded_state_dict_checks_and_copies(world_size):
    for errors in on(world_size, copy_in):
        assert [kind for kind, _ in errors] == ["ValueError"] * 4
        assert "5 classes of width 3, got 6 classes of width 3" in errors[0][1]
        assert "5 classes of width 3, got 5 classes of width 4" in errors[1][1]
        assert "entries ['weight'], got ['scale', 'weight']" in errors[2][1]
        assert "entries ['weight'], got ['bias']" in errors[3][1]
