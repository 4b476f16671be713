"""examples/characters, killed and interrupted, and started again on other numbers of ranks: it goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fontTools", reason="the example's own packages are not installed")

from examples.characters import glyphs, log, options, resume, terminal, train

from .ranks import run_ranks

DESIGNS = ["Gallery", "Kai", "Ming", "Test"]
NUM_CHARACTERS = 150


@pytest.fixture
def flags(tmp_path):
    """Of a training on random shapes: a cache that holds them, fonts that nobody opens."""
    root = tmp_path
    (root / "fonts").mkdir()
    (root / "fonts" / "empty.ttf").touch()
    argv = ["--fonts", str(root / "fonts"), "--cache", str(root / "cache"), "--out", str(root / "out")]
    argv += ["--gallery", "Gallery", "--test-typefaces", "Test", "--no-compile", "--batch", "16"]
    argv += ["--seconds", "6", "--save-every", "0.5"]
    asked = options.parse(argv)
    assert asked.fonts is not None
    cache = asked.cache / f"glyphs-{glyphs._fingerprint(asked.fonts, asked)}"
    cache.mkdir(parents=True)
    random = np.random.default_rng(0)
    shapes = np.kron(random.integers(0, 2, (NUM_CHARACTERS, 8, 8)), np.ones((5, 5))) * 200
    images = [shapes + random.integers(0, 50, shapes.shape) for _ in DESIGNS]
    np.save(cache / "images.npy", np.concatenate(images).astype(np.uint8))
    identity = np.tile(np.arange(NUM_CHARACTERS, dtype=np.int32), len(DESIGNS))
    design = np.repeat(np.arange(len(DESIGNS), dtype=np.int16), NUM_CHARACTERS)
    np.savez(cache / "index.npz", codepoint=identity + 0x4E00, design=design, identity=identity, names=DESIGNS)
    return argv


@pytest.fixture
def start(flags):
    """Starts a training with these flags on so many ranks; none outlives the test."""
    started = []

    def start(ranks, *more):
        started.append(Training([*flags, *more], ranks))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.kill()


class Training:
    """One `torchrun` of the example's training."""

    def __init__(self, flags, ranks):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self.out = Path(flags[flags.index("--out") + 1])
        self.process = subprocess.Popen(
            [*command, "-m", "examples.characters.train", *flags],
            cwd=options.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_a_checkpoint(self):
        """One that is newer than this call."""
        written, start, deadline = self.out / "unfinished" / "state" / ".metadata", time.time(), time.monotonic() + 60
        while not (written.exists() and written.stat().st_mtime > start):
            assert self.process.poll() is None, f"ended before a checkpoint: {self.output()}"
            assert time.monotonic() < deadline, "no checkpoint within a minute"
            time.sleep(0.05)

    def kill(self):
        """All its processes, none of which gets to do anything about it."""
        for process in [self.process.pid, *descendants(self.process.pid)]:
            os.kill(process, signal.SIGKILL)
        self.process.communicate()

    def output(self):
        return self.process.communicate(timeout=60)[0]


def descendants(process):
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def test_a_training_goes_on_after_kill_and_interrupt_on_other_numbers_of_ranks(start):
    killed = start(2)
    killed.wait_for_a_checkpoint()
    killed.kill()

    interrupted = start(3)
    interrupted.wait_for_a_checkpoint()
    interrupted.process.send_signal(signal.SIGINT)
    said = interrupted.output()
    assert "goes on after" in said
    assert "the same command goes on from there" in said
    assert "gloo" not in said and "Connection closed" not in said, said
    assert interrupted.process.returncode != 0

    last = start(1)
    said = last.output()
    assert last.process.returncode == 0, said
    log = json.loads((last.out / "log.json").read_text())
    first, second = log["resumed"]
    assert 0.5 <= first < second < 6
    assert f"goes on after {second:.1f} of 6 s" in said
    # One clock over all three, and the steps of each: those after the last checkpoint of the killed one are lost.
    seconds = np.array(log["seconds"])
    assert (np.diff(seconds) > 0).all() and seconds[-1] == pytest.approx(6, abs=1)
    steps = [(seconds < first).sum(), ((seconds > first) & (seconds < second)).sum(), (seconds > second).sum()]
    assert min(steps) > 0 and sum(steps) == len(seconds) == len(log["loss"])
    assert log["images"] == 16 * (2 * steps[0] + 3 * steps[1] + steps[2])
    assert len(log["validation"]) >= 3 and [t for t, _ in log["validation"]] == sorted(t for t, _ in log["validation"])
    # What was learnt before the interrupts was kept: the loss goes on from there, not from the start.
    loss = np.array(log["loss"])
    begun = loss[:5].mean()
    assert loss[steps[0] :][:5].mean() < begun and loss[-5:].mean() < begun / 2
    assert not (last.out / "unfinished").exists()  # finished: the next one begins anew


def test_another_training_is_not_gone_on_with(flags):
    begun = options.parse(flags)
    resume.check(begun)
    (begun.out / "unfinished").mkdir(parents=True)
    (begun.out / "unfinished" / "settings.json").write_text(json.dumps(resume._settings(begun)))
    for harmless in (["--ranks", "5"], ["--save-every", "2"]):
        resume.check(options.parse([*flags, *harmless]))
    changed = ["--seconds", "9", "--sample-rate", "0.5"]
    message = r"had --seconds 6.0 --sample-rate 0.1, not --seconds 9.0 --sample-rate 0.5: .*--fresh"
    with pytest.raises(terminal.Failure, match=message):
        resume.check(options.parse([*flags, *changed]))
    resume.check(options.parse([*flags, *changed, "--fresh"]))


class NoStop(resume.Stop):
    def __init__(self):
        self.asked = self.steps = False


def losses_of_a_training(argv):
    """On this rank of the pool, with a clock that counts steps, so that every training takes as many."""
    asked = options.parse(argv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.Log, "elapsed", lambda self: (len(self.loss) + 1) / 20)
        train._train(asked, torch.device("cpu"), NoStop())
    return json.loads((asked.out / "log.json").read_text())["loss"]


def test_half_precision_learns_as_much(flags):
    flags += ["--seconds", "1", "--batch", "8"]  # 19 steps: float16 convolutions are slow on a CPU
    losses = {p: run_ranks(2, losses_of_a_training, [*flags, "--precision", p])[0] for p in train.DTYPES}
    begun, full = np.mean(losses["fp32"][:5]), np.mean(losses["fp32"][-5:])
    assert len(losses["fp32"]) == 19 and full < 0.6 * begun
    for precision in ("bf16", "fp16"):
        assert losses[precision] != losses["fp32"]
        assert np.mean(losses[precision][-5:]) == pytest.approx(full, abs=0.1 * begun), precision
