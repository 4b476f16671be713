"""A loss exported with a dynamic batch, saved, and loaded in a fresh process gives the same values."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_pfc

from .ranks import run_ranks

NUM_CLASSES = 50

# What a user's own process does with a saved program: importing torch_pfc registers the operators.
LOAD_AND_RUN = """
import sys
import torch
import torch_pfc
program, inputs, outputs = sys.argv[1:]
module = torch.export.load(program).module()
torch.save([module(*args) for args in torch.load(inputs)], outputs)
"""


class Loss(nn.Module):
    """A backbone and its head; `key` is an input, so that a saved program samples what its caller says."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = torch_pfc.PartialFC(8, NUM_CLASSES, scale=16.0, **options)

    def forward(self, images, labels, key):
        return self.head(self.backbone(images), labels, key=key)


def batch(size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (size,), generator=generator)
    return torch.randn(size, 6, generator=generator), labels, torch.tensor(size)


def export(model: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(model, batch(8), dynamic_shapes=({0: rows}, {0: rows}, None), strict=strict)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("sample_rate", [0.2, 1.0])
def test_a_saved_program_equals_the_module_in_a_fresh_process(tmp_path, strict, sample_rate):
    model = Loss(sample_rate=sample_rate, margin=torch_pfc.ArcFace(0.5))
    torch.export.save(export(model, strict), tmp_path / "loss.pt2")
    batches = [batch(8), batch(3), batch(80)]
    torch.save(batches, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", LOAD_AND_RUN, "loss.pt2", "inputs.pt", "outputs.pt"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    expected = [model(*args).detach() for args in batches]
    torch.testing.assert_close([out.detach() for out in torch.load(tmp_path / "outputs.pt")], expected)


def export_and_run(path: str, strict: bool):
    """On each rank: the exported program's loss, after a trip through a file, and the module's."""
    model = Loss(sample_rate=0.2)
    rank = model.head.group.rank
    torch.export.save(export(model, strict), f"{path}/rank{rank}.pt2")
    program = torch.export.load(f"{path}/rank{rank}.pt2").module()
    inputs = batch(5, seed=rank)
    return program(*inputs).detach(), model(*inputs).detach()


def run_the_other_ranks_program(path: str):
    rank = torch.distributed.get_rank()
    program = torch.export.load(f"{path}/rank{1 - rank}.pt2").module()
    with pytest.raises(RuntimeError, match=rf"built for rank {1 - rank} of 2 .* but runs as rank {rank} of 2"):
        program(*batch(5))


def run_in_a_larger_group(path: str):
    program = torch.export.load(f"{path}/rank0.pt2").module()
    with pytest.raises(RuntimeError, match=r"built for rank 0 of 2 .* but runs as rank . of 3"):
        program(*batch(5))


@pytest.mark.parametrize("strict", [True, False])
def test_a_program_of_two_ranks_runs_on_its_own_rank_and_group_only(tmp_path, strict):
    for exported, eager in run_ranks(2, export_and_run, str(tmp_path), strict, timeout=120):
        torch.testing.assert_close(exported, eager)
    run_ranks(2, run_the_other_ranks_program, str(tmp_path))
    run_ranks(3, run_in_a_larger_group, str(tmp_path))
    program = torch.export.load(tmp_path / "rank0.pt2").module()
    with pytest.raises(RuntimeError, match="does not exist in this process"):
        program(*batch(5))
