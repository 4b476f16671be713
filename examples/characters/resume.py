"""What a training keeps while it runs, so that the same command goes on where an interrupted one ended.

    OUT/unfinished/settings.json    what must be the same to go on
    OUT/unfinished/state            the checkpoint: network, centres, optimizer, clock and log

The number of ranks may change: `torch_pfc.checkpoint` deals the classes out anew. What is not kept is the place in the
data: one that goes on begins a new pass over the glyphs, in an order and with variations of their own.
"""

import json
import shutil
import signal
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import torch_pfc
from torch_pfc import checkpoint

from .options import Options
from .terminal import Failure

# All other options say where things are, or how fast they go.
DECISIVE = ("fonts", "test_typefaces", "gallery", "seconds", "batch", "sample_rate", "precision", "seed", "smoke")


def _folder(options: Options) -> Path:
    return options.out / "unfinished"


def _settings(options: Options) -> dict[str, Any]:
    decisive = {name: getattr(options, name) for name in DECISIVE}
    return {name: str(value) if isinstance(value, Path) else value for name, value in decisive.items()}


def check(options: Options) -> None:
    """Says early that what was interrupted here is another training.

    Raises:
        Failure: its options differ from these, and `--fresh` is not given.
    """
    begun = _folder(options) / "settings.json"
    if options.fresh or not begun.exists():
        return
    before, now = json.loads(begun.read_text()), _settings(options)
    changed = [name for name in DECISIVE if before.get(name) != now[name]]
    if changed:
        was, wanted = (
            " ".join(f"--{name.replace('_', '-')} {given.get(name)}" for name in changed) for given in (before, now)
        )
        raise Failure(
            f"the training that was interrupted in {options.out} had {was}, not {wanted}: go on with its own options, "
            "or begin anew with --fresh, or elsewhere with --out"
        )


class Keeper:
    """Writes and reads the checkpoint of one training; every rank calls everything."""

    def __init__(
        self, options: Options, head: torch_pfc.PartialFC, optimizer: Optimizer, backbone: nn.Module, **others: Any
    ) -> None:
        self.options, self.head, self.optimizer, self.backbone = options, head, optimizer, backbone
        self.others = {"backbone": backbone, **others}
        self.state = _folder(options) / "state"
        self._writing: Future[None] | None = None

    def begin(self) -> None:
        """Loads the last checkpoint, unless there is none or a fresh start is asked for; then clears the place."""
        if not self.options.fresh:
            try:
                checkpoint.load(self.state, self.head, self.optimizer, others=self.others)
                return
            except FileNotFoundError:
                pass
            except (ValueError, RuntimeError) as error:
                raise Failure(
                    f"cannot go on from what is in {self.state.parent}: {error}; --fresh begins anew"
                ) from None
        self.remove()
        if dist.get_rank() == 0:
            _folder(self.options).mkdir(parents=True)
            (_folder(self.options) / "settings.json").write_text(json.dumps(_settings(self.options)) + "\n")

    def save(self) -> None:
        """Copies everything and writes it while the training goes on; fails if the last one could not be written."""
        self._finish()
        # Each rank averages the statistics of its own batches between two steps; DDP goes on with rank 0's.
        for buffer in self.backbone.buffers():
            dist.broadcast(buffer, src=0)
        self._writing = checkpoint.async_save(self.state, self.head, self.optimizer, others=self.others)

    def close(self, *, finished: bool) -> None:
        """Waits for what is being written; of a finished training nothing is kept."""
        self._finish()
        if finished:
            self.remove()

    def remove(self) -> None:
        """Leaves nothing to go on from."""
        dist.barrier()
        if dist.get_rank() == 0 and _folder(self.options).exists():
            shutil.rmtree(_folder(self.options))

    def _finish(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None


class Stop:
    """Notes SIGINT and SIGTERM. Outside of the steps they end this rank at once; between steps, all ranks together.

    A rank that ended alone would leave the others in a collective, which they would report as an error of theirs.
    """

    def __init__(self) -> None:
        self.asked = self.steps = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and not self.steps:
            raise KeyboardInterrupt
