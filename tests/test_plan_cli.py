"""`python -m torch_pfc.plan`: its text, its JSON, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_pfc.plan import plan
from torch_pfc.plan.__main__ import human, main

PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
ISSUE = "--classes 100e6 --dim 512 --ranks 64 --batch 128 --sample-rate 0.1 --dtype bf16 --optimizer sgd"


def call(arguments: str) -> int:
    return main(arguments.split())


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A matrix of 100 GB of classes over 64 ranks, planned on this machine; also what docs/plan.md shows."""
    assert call(f"{ISSUE} --memory 80GB") == 0
    text = capsys.readouterr().out
    assert (
        text
        == """\
100,000,000 classes of width 512, bf16, sample rate 0.1
rank 0 of 64: 1,562,500 classes, 128 rows, cpu
sgd, sparse gradient

weight                1.6 GB
optimizer state          0 B
gradient              161 MB
activations          10.1 MB
                     forward    backward   optimizer
matmuls           1.31 TFLOP  3.93 TFLOP      0 FLOP
collectives                4           3           0
  put in              198 kB     8.39 MB         0 B
  got out            8.52 MB      229 kB         0 B
peak                 1.66 GB     1.86 GB     1.76 GB
peak of all          1.86 GB
memory                 80 GB  fits, 78.1 GB to spare
"""
    )
    assert text in PAGE.read_text()


def test_text_of_a_fused_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The other example of docs/plan.md: ten million classes and momentum on one machine with 24 GiB."""
    step = "--classes 10e6 --dim 512 --batch 512 --dtype bf16 --optimizer sparse_momentum --memory 24GiB"
    assert call(step) == 1
    capsys.readouterr()
    assert call(f"{step} --fused --saved-logits 4GB") == 0
    assert capsys.readouterr().out in PAGE.read_text()


def test_the_command() -> None:
    command = [sys.executable, "-W", "error", "-m", "torch_pfc.plan", "--classes", "10", "--dim", "4", "--rank", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == "python -m torch_pfc.plan: error: rank must lie in [0, 1), got 1"


def test_exit_status_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--classes 1_000 --dim 64"
    assert call(f"{small} --memory 20MiB") == 0
    assert call(f"{small} --memory 500kB") == 1
    assert "does not fit, " in capsys.readouterr().out
    assert call(small) == 0


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--classes 1e4 --dim 64 --ranks 2 --rank 1 --dense-grad --saved-logits 1MiB --json --memory 1e9") == 0
    answer = json.loads(capsys.readouterr().out)
    found = plan(10_000, 64, ranks=2, rank=1, sparse_grad=False, saved_logits_bytes=1 << 20)
    assert (answer["settings"]["saved_logits_bytes"], answer["settings"]["fused"]) == (1 << 20, False)
    assert answer["settings"]["num_classes"] == 10_000
    assert answer["peak_bytes"] == found.peak_bytes
    assert answer["backward"]["collectives"][-1] == {
        "name": "reduce_scatter_tensor",
        "bytes_in": 256 * 64 * 4,
        "bytes_out": 128 * 64 * 4,
    }
    assert (answer["memory_bytes"], answer["fits"]) == (10**9, True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--classes 0", "argument --classes: must be at least 1, got 0"),
        ("--classes 1.5", "argument --classes: must be a whole number of at most 18 digits, got '1.5'"),
        ("--classes many", "argument --classes: must be a whole number of at most 18 digits, got 'many'"),
        ("--classes 1e999999999", "argument --classes: must be a whole number of at most 18 digits"),
        ("--classes inf", "argument --classes: must be a whole number of at most 18 digits, got 'inf'"),
        ("--dim 0", "argument --dim: must be at least 1, got 0"),
        ("--ranks 0", "argument --ranks: must be at least 1, got 0"),
        ("--batch -3", "argument --batch: must be at least 1, got -3"),
        ("--sample-rate 1.5", "argument --sample-rate: must lie in [0, 1], got 1.5"),
        ("--sample-rate nan", "argument --sample-rate: must lie in [0, 1], got nan"),
        ("--sample-rate some", "argument --sample-rate: must lie in [0, 1], got some"),
        ("--dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("--optimizer lion", "argument --optimizer: invalid choice: 'lion'"),
        ("--sparse-grad --optimizer adamw", "optimizer 'adamw' takes dense gradients alone, got sparse_grad=True"),
        ("--sparse-grad --dense-grad", "argument --dense-grad: not allowed with argument --sparse-grad"),
        ("--fused --optimizer sparse_sgd --dense-grad", "argument --dense-grad: not allowed with argument --fused"),
        ("--fused", "fused needs an optimizer of sparse_sgd, sparse_momentum, sparse_adamw, got 'sgd'"),
        ("--saved-logits -1", "argument --saved-logits: must be a size such as 80GB (10⁹ bytes)"),
        ("--saved-logits 1e19", "saved_logits_bytes must lie in [0, 2⁶³), got 10000000000000000000"),
        ("--ranks 4 --rank 4", "rank must lie in [0, 4), got 4"),
        (
            "--memory 80XB",
            "argument --memory: must be a size such as 80GB (10⁹ bytes), 80GiB (2³⁰) or 80e9, got '80XB'",
        ),
        ("--memory 0GB", "argument --memory: must be at least 1 byte, got '0GB'"),
        ("--classes 1e17 --dim 4096", "a shard of 100000000000000000 rows of width 4096 is more than any machine"),
    ],
)
def test_impossible_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call(f"--classes 10 --dim 4 {arguments}")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"sample_rate": -0.5}, r"sample_rate must lie in \[0, 1\], got -0.5"),
        ({"dtype": "fp8"}, "dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, got 'tpu'"),
        ({"optimizer": "momentum", "sparse_grad": True}, "optimizer 'momentum' takes dense gradients alone"),
        ({"optimizer": "adamw", "fused": True}, "fused needs an optimizer of sparse_sgd, .*, got 'adamw'"),
        ({"optimizer": "sparse_sgd", "fused": True, "sparse_grad": False}, "leaves no gradient, got sparse_grad=False"),
        ({"saved_logits_bytes": -1}, r"saved_logits_bytes must lie in \[0, 2⁶³\), got -1"),
    ],
    ids=str,
)
def test_the_function_refuses_as_well(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**{"num_classes": 10, "embedding_dim": 4} | options)


@pytest.mark.parametrize(
    "value, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (2e21, "2e+03 EB")],
)
def test_units(value: float, text: str) -> None:
    assert human(value, "B") == text
