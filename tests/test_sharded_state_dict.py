"""sharded_state_dict and load_sharded_state_dict, for a caller's own call of torch.distributed.checkpoint."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import torch_pfc

from .inputs import error_of
from .ranks import run_ranks
from .test_checkpoint import on


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
