"""What is on the disk: damaged and foreign files are refused, and the old checkpoint outlives a crash of a new save."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import torch_pfc
from torch_pfc.checkpoint import load, save

from .inputs import error_of
from .ranks import RankError, run_ranks

DIM, NUM_CLASSES = 3, 5


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    head = torch_pfc.PartialFC(DIM, NUM_CLASSES)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    head(torch.randn(4, DIM), torch.arange(4)).backward()
    optimizer.step()
    return head, optimizer


def save_trained(path: str, seed: int = 0) -> torch.Tensor:
    head, optimizer = trained(seed)
    save(path, head, optimizer)
    weight: torch.Tensor = head.weight.detach()
    return weight


def failing_load(path: str) -> tuple[str, str, bool]:
    """The error, and whether everything is as it was before."""
    head, optimizer = trained(seed=5)
    before = copy.deepcopy((head.state_dict(), optimizer.state_dict()))
    kind, message = error_of(lambda: load(path, head, optimizer))
    return kind, message, str(before) == str((head.state_dict(), optimizer.state_dict()))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def overwrite(file: Path) -> None:
    """Of the same size, so that it takes reading to find out; what rank 0 reads is in another file."""
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "truncated": (
        lambda d: truncate(d / "__1_0.distcp"),
        "RuntimeError",
        "__1_0.distcp is truncated or damaged: expected",
    ),
    "missing": (lambda d: (d / "__1_0.distcp").unlink(), "RuntimeError", "__1_0.distcp is missing"),
    "overwritten": (
        lambda d: overwrite(d / "__1_0.distcp"),
        "RuntimeError",
        "run is damaged or cannot be read: rank 1:",
    ),
    "metadata truncated": (lambda d: truncate(d / ".metadata"), "RuntimeError", "run/.metadata is damaged or of no"),
    "metadata empty": (lambda d: os.truncate(d / ".metadata", 0), "RuntimeError", "run/.metadata is damaged or of no"),
    "metadata foreign": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"weight": 1})),
        "RuntimeError",
        "run/.metadata is damaged or of no checkpoint",
    ),
    "metadata missing": (lambda d: (d / ".metadata").unlink(), "FileNotFoundError", "run is no checkpoint: it has no"),
    "no directory": (lambda d: d.rename(d.with_name("else")), "FileNotFoundError", "there is no checkpoint at"),
    "a file": (
        lambda d: torch.save({}, d.rename(d.with_name("else")).with_name("run")),
        "FileNotFoundError",
        "run is no checkpoint: it has no file .metadata",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_raises_on_every_rank_and_changes_nothing(tmp_path, damage):
    run_ranks(2, save_trained, str(tmp_path / "run"))
    assert sorted(os.listdir(tmp_path / "run")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    do, error, words = DAMAGES[damage]
    do(tmp_path / "run")
    answers = run_ranks(2, failing_load, str(tmp_path / "run"))
    if damage in ("truncated", "missing"):  # rank 0 alone looks at the sizes
        assert answers[1][0] == "RuntimeError" and "on rank 0 of 2: RuntimeError: " in answers[1][1]
    for kind, message, unchanged in answers:
        assert kind == error and words in message, message
        assert unchanged


def save_foreign(path: str) -> None:
    dcp.save({"model": {"bias": torch.ones(2)}}, checkpoint_id=path)


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path):
    run_ranks(2, save_foreign, str(tmp_path / "run"))
    for kind, message, unchanged in run_ranks(2, failing_load, str(tmp_path / "run")):
        assert kind == "RuntimeError" and unchanged
        assert message.endswith("is no checkpoint of torch_pfc.checkpoint: its first entries are ['model.bias']")


def test_save_replaces_nothing_but_a_checkpoint(tmp_path):
    head, _ = trained(0)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file, not a checkpoint"):
        save(tmp_path / "file", head)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"folder holds files that are of no checkpoint.*\['thesis.tex'\]"):
        save(tmp_path / "folder", head)
    with pytest.raises(ValueError, match="must be a directory of a file system, got 's3://bucket/run'"):
        save("s3://bucket/run", head)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", head)
    save(tmp_path / "new" / "run", head)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "folder", "new"]
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "mine"


def test_a_link_stays_a_link(tmp_path):
    save_trained(str(tmp_path / "run1"), seed=1)
    (tmp_path / "latest").symlink_to("run1")
    weight = save_trained(str(tmp_path / "latest"), seed=2)
    assert (tmp_path / "latest").is_symlink()
    head, _ = trained(0)
    load(tmp_path / "run1", head)
    assert torch.equal(head.weight, weight)


# Saves seed 2 over seed 1 once for each point at which a process may die, in a child of its own that dies there.
CRASHES = """
import os, shutil, sys
import torch.distributed.checkpoint as dcp
from tests.test_checkpoint_files import save_trained

def die_at(module, name, call):
    real, calls = getattr(module, name), iter(range(100))
    def patched(*args, **kwargs):
        if next(calls) == call:
            os._exit(42)
        return real(*args, **kwargs)
    setattr(module, name, patched)

POINTS = {
    "before_writing": lambda: die_at(dcp.FileSystemWriter, "write_data", 0),
    "a_file_written": lambda: die_at(os, "fsync", 0),
    "no_metadata_yet": lambda: die_at(dcp.FileSystemWriter, "finish", 0),
    "no_metadata_name": lambda: die_at(os, "rename", 0),
    "complete": lambda: die_at(os, "rename", 1),
    "between_renames": lambda: die_at(os, "rename", 2),
    "renamed": lambda: die_at(shutil, "rmtree", 0),
}
for point, prepare in POINTS.items():
    path = os.path.join(sys.argv[1], point)
    save_trained(path, seed=1)
    child = os.fork()
    if child == 0:
        prepare()
        save_trained(path, seed=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42, (point, status)
    print(point)
"""


def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CRASHES, str(tmp_path)]
    output = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    points = output.split()
    assert len(points) == 7
    old, new = trained(1)[0].weight, trained(2)[0].weight
    for point in points:
        left = sorted(p.name.removeprefix(point) for p in tmp_path.iterdir() if p.name.startswith(point))
        between = [".previous", ".saving"]
        assert left == {"renamed": ["", ".previous"], "between_renames": between}.get(point, ["", ".saving"])
        head, optimizer = trained(0)
        load(tmp_path / point, head, optimizer)
        assert torch.equal(head.weight, new if point == "renamed" else old), point
        assert optimizer.state[head.weight]["step"] == 1
    for point in points:  # and the next save clears up
        weight = save_trained(str(tmp_path / point), seed=3)
        load(tmp_path / point, head)
        assert torch.equal(head.weight, weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(points)


def die_while_others_write(path: str) -> None:
    write_data = FileSystemWriter.write_data

    def dying(self: Any, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(1)
        return write_data(self, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", dying):
        save_trained(path, seed=2)


def loaded(path: str) -> torch.Tensor:
    head, optimizer = trained(0)
    load(path, head, optimizer)
    weight: torch.Tensor = head.weight.detach()
    return weight


def test_a_killed_rank_leaves_the_old_checkpoint(tmp_path):
    before = run_ranks(2, save_trained, str(tmp_path / "run"), 1)
    with pytest.raises(RankError, match="rank 1 of 2: the process died"):
        run_ranks(2, die_while_others_write, str(tmp_path / "run"))
    assert torch.equal(torch.cat(run_ranks(3, loaded, str(tmp_path / "run"))), torch.cat(before))


def fail_while_others_write(path: str) -> tuple[str, str]:
    write_data = FileSystemWriter.write_data

    def failing(self: Any, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        return write_data(self, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", failing):
        return error_of(lambda: save_trained(path, seed=2))


def test_a_failure_on_one_rank_raises_on_all_and_leaves_the_old_checkpoint(tmp_path):
    path = str(tmp_path / "run")
    before = run_ranks(3, save_trained, path, 1)
    for kind, message in run_ranks(3, fail_while_others_write, path):
        assert kind == "RuntimeError" and "rank 1: OSError: No space left on device" in message
    assert torch.equal(torch.cat(run_ranks(2, loaded, path)), torch.cat(before))
    after = run_ranks(2, save_trained, path, 3)
    assert torch.equal(loaded(path), torch.cat(after)) and os.listdir(tmp_path) == ["run"]


def save_apart(path: str) -> tuple[str, str]:
    return error_of(lambda: save_trained(f"{path}{dist.get_rank()}"))


def test_ranks_that_give_different_paths_are_told(tmp_path):
    for kind, message in run_ranks(2, save_apart, str(tmp_path / "run")):
        assert kind == "RuntimeError" and "every rank must give the same path" in message
    assert not (tmp_path / "run0").exists()
