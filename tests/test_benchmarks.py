"""benchmarks/ runs, gives every figure, and compares equals: its contenders compute the same."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from benchmarks import contenders, measure, tables
from benchmarks.contenders import LOSS, SAMPLING, STEP, Case, Inputs
from benchmarks.suites import GROWTH_FACTORS, SUITES, grown

from .inputs import relative_error

ROOT = pathlib.Path(__file__).parent.parent
EXPECTED = {
    "loss": list(LOSS),
    "step": list(STEP),
    "growth": [contenders.FUSED] * 4 * len(GROWTH_FACTORS),
    "sample": list(SAMPLING),
    "ranks": ["1 rank", "2 ranks"],
    "ten_million": [contenders.FUSED],
}
# Rate 1: every contender scores the same classes.
CASE = Case(24, 16, 300)


def has_memory(record):
    return record["suite"] in ("loss", "step", "growth") and record["contender"] not in contenders.FLOORS


def benchmarks(*arguments):
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "benchmarks", *map(str, arguments)]
    # At these sizes a second thread is only one more to wait for.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder and the terminal of one run of all suites."""
    out = tmp_path_factory.mktemp("benchmarks")
    return out, benchmarks("--all", "--quick", "--rounds", 2, "--out", out)


def test_every_suite_gives_every_contender_in_finite_numbers(quick):
    out, _ = quick
    results = json.loads((out / "results.json").read_text())
    found: dict[str, list[str]] = {}
    for record in results["records"]:
        found.setdefault(record["suite"], []).append(record["contender"])
        assert len(record["seconds"]) == (10 if record["suite"] == "ten_million" else 2)
        assert all(0 < seconds < math.inf for seconds in record["seconds"]), record
        assert ("peak_growth_mb" in record) == has_memory(record)
        assert 0 <= record.get("peak_growth_mb", 0) < math.inf
        assert 0 <= record.get("collectives", 0) < 1
    assert found == EXPECTED and list(found) == list(SUITES)
    two_ranks, ten_million = results["records"][-2:]
    assert two_ranks["collectives"] > 0 and ten_million["peak_mb"] > 50
    machine = results["machine"]
    assert machine["torch"] == torch.__version__ and all(rate > 0 for rate in machine["matmul_gflops"].values())


def test_tables_on_the_terminal_and_for_a_page(quick):
    out, terminal = quick
    page = benchmarks("--markdown", out / "results.json")
    titles = ["orward + backward", "hole step", "rowth", "ampling", "anks", "en steps"]
    for name in [*titles, *LOSS, *STEP, *SAMPLING, "1 rank", "2 ranks"]:
        assert name in terminal and name in page, name
    assert page.count("| :-- |") == page.count("**") // 2 == 6


def test_the_picture_opens_and_is_drawn_again(quick):
    image = pytest.importorskip("PIL.Image")
    path = quick[0] / "benchmarks.png"
    first = image.open(path).convert("L")
    assert len(first.getcolors()) > 10
    path.unlink()
    benchmarks("--plot", quick[0] / "results.json")
    assert image.open(path).convert("L").tobytes() == first.tobytes()


def test_an_unknown_suite_is_named():
    with pytest.raises(AssertionError, match=r"suites must be of loss, .* got speed"):
        benchmarks("speed")


@pytest.mark.parametrize("name", [name for name in LOSS if name not in contenders.FLOORS])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_contenders_of_the_loss_compute_the_same(name, dtype, tolerance):
    case = Case(CASE.rows, CASE.dim, CASE.num_classes, dtype=dtype)
    expected = contenders.materialised_loss(Inputs(CASE), compiled=False)()
    assert LOSS[name](Inputs(case))().item() == pytest.approx(expected.item(), rel=tolerance)


@pytest.mark.parametrize("name", [name for name in STEP if name != "materialised, eager"])
def test_contenders_of_the_step_move_weight_and_momentum_alike(name):
    expected, found = Inputs(CASE), Inputs(CASE)
    reference, step = STEP["materialised, eager"](expected), STEP[name](found)
    for _ in range(3):
        torch.testing.assert_close(step(), reference(), rtol=1e-5, atol=1e-5)
    assert relative_error(expected.weight, Inputs(CASE).weight) > 0.1
    assert relative_error(found.weight, expected.weight) < 1e-5
    assert relative_error(found.momentum, expected.momentum) < 1e-5


def test_contenders_score_as_many_classes_where_they_sample():
    case = Case(8, 16, 1000, 0.1)
    inputs = Inputs(case)
    for head in (contenders.materialised(inputs), contenders.partial_fc(inputs)):
        head(inputs.embeddings, inputs.labels).backward()
        assert head.weight.grad is not None
        assert (head.weight.grad.to_dense() != 0).any(dim=1).sum() == case.num_sampled == 100


def test_what_grows_is_one_quantity():
    base = Case(8, 16, 1000, 0.1)
    sizes = {axis: grown(base, axis, 4) for axis in "NDSK"}
    found = {axis: (case.rows, case.dim, case.num_sampled, case.num_classes) for axis, case in sizes.items()}
    assert found == {
        "N": (32, 16, 100, 1000),
        "D": (8, 64, 100, 1000),
        "S": (8, 16, 400, 1000),
        "K": (8, 16, 100, 4000),
    }


def test_an_exponent_is_that_of_the_medians():
    records = [{"factor": factor, "seconds": [7.0 * factor**1.5, 0.0, 1e9]} for factor in (1, 2, 4)]
    assert tables.exponent(records) == pytest.approx(1.5)


def test_contenders_take_turns():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = measure.alternate(steps, rounds=3)
    assert calls == ["a"] * measure.WARM_UP + ["b"] * measure.WARM_UP + ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [3, 3]


def _passing_allocation():
    torch.ones(25_000_000)


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux")
def test_memory_is_the_peak_of_a_step_and_not_what_was_there():
    assert measure.in_own_process(measure.peak_growth, _passing_allocation) == pytest.approx(100, abs=5)
