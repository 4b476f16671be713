"""An exported scoring program, embeddings to the best classes: saved, on two ranks, and packaged by AOTInductor."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

import torch_pfc

from .ranks import run_ranks

NUM_CLASSES, K = 50, 3

LOAD_AND_RUN = """
import sys
import torch
import torch_pfc
package, inputs, outputs = sys.argv[1:]
score = torch._inductor.aoti_load_package(package)
torch.save([score(images) for images in torch.load(inputs)], outputs)
"""


class Score(nn.Module):
    """Images to the cosines and ids of the closest classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(6, 8)
        self.head = torch_pfc.PartialFC(8, NUM_CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.topk(self.backbone(images), K)


def export(model: nn.Module, strict: bool = True) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1, max=1024)
    return torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({0: rows},), strict=strict)


def check_on_each_rank(path: str) -> None:
    model, rank = Score(), torch.distributed.get_rank()
    torch.export.save(export(model), f"{path}/score{rank}.pt2")
    program = torch.export.load(f"{path}/score{rank}.pt2").module()
    images = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    torch.testing.assert_close(program(images), model(images))


def run_the_other_ranks_program(path: str) -> None:
    rank = torch.distributed.get_rank()
    program = torch.export.load(f"{path}/score{1 - rank}.pt2").module()
    with pytest.raises(RuntimeError, match=rf"built for rank {1 - rank} of 2 .* but runs as rank {rank} of 2"):
        program(torch.randn(5, 6))


def test_a_saved_scoring_program_runs_on_its_own_rank_only(tmp_path):
    run_ranks(2, check_on_each_rank, str(tmp_path), timeout=120)
    run_ranks(2, run_the_other_ranks_program, str(tmp_path))


@pytest.mark.parametrize("strict", [True, False])
def test_the_program_holds_a_gather_and_a_topk(strict):
    """Flat, for a reader and for other backends: no nested graph."""
    graph = export(Score(), strict).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("pfc.")] == ["pfc.gather.default", "pfc.sharded_topk.default"]
    assert not [name for name in called if "wrap" in name]


def test_a_package_of_aot_inductor_runs_in_a_fresh_process(tmp_path):
    model = Score()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch pickles its own deprecated pytree type
        package = torch._inductor.aoti_compile_and_package(export(model), package_path=str(tmp_path / "score.pt2"))
    batches = [torch.randn(rows, 6) for rows in (4, 1, 9)]
    torch.save(batches, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", LOAD_AND_RUN, package, "inputs.pt", "outputs.pt"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt"), [tuple(model(images)) for images in batches])
