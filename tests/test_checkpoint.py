"""Saved at one number of ranks, loaded at another: the weight, the optimizer and the step after it."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torch_pfc

from .inputs import error_of, even, my_rows, random_batch
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


def test_a_dcp_tool_reads_it(tmp_path):
    before = on(3, train_and_save, str(tmp_path / "run"), 5, "adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=False)
    assert torch.equal(saved["head.weight"], torch.cat([f.weight for f in before]))
    assert torch.equal(saved["optimizer.state.0.exp_avg"], torch.cat([f.state["exp_avg"] for f in before]))
