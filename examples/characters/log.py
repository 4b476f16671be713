"""What rank 0 notes of a training, shows on a bar, and writes to `log.json` for the report."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from .options import Options
from .terminal import BAR


class Log:
    """What rank 0 notes and shows. The clock starts when it is made, or goes on when it is loaded."""

    def __init__(self, options: Options, designs: list[str], compile_seconds: float) -> None:
        self.options, self.designs, self.compile_seconds = options, designs, compile_seconds
        self.seconds: list[float] = []
        self.loss: list[float] = []
        self.validation: list[tuple[float, float]] = []
        self.resumed: list[float] = []
        self.images = 0
        self.per_step = options.batch * dist.get_world_size()
        self.start = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """What rank 0 has noted, and the number of steps, for a checkpoint."""
        kept = {name: list(getattr(self, name)) for name in ("seconds", "loss", "validation", "resumed")}
        return kept | {"images": self.images, "elapsed": self.elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the log and the clock of an earlier training."""
        self.seconds, self.loss, self.validation = state["seconds"], state["loss"], state["validation"]
        self.resumed = [*state["resumed"], state["elapsed"]]
        self.images = state["images"]
        self.start = time.monotonic() - state["elapsed"]

    def elapsed(self) -> float:
        """Seconds of training so far, validation and checkpoints included."""
        return time.monotonic() - self.start

    def bar(self) -> tqdm[NoReturn]:
        """Over the seconds of training; silent on other ranks."""
        return tqdm(
            initial=self.elapsed() if self.resumed else 0,
            total=self.options.seconds,
            desc="train",
            bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s, {remaining} left{postfix}",
            disable=dist.get_rank() != 0,
            **BAR,
        )

    def step(self, bar: tqdm[NoReturn], loss: float) -> None:
        """Notes a step's loss and moves the bar."""
        self.seconds.append(self.elapsed())
        self.loss.append(loss)
        self.images += self.per_step
        speed = self.images / self.seconds[-1]
        shown = f"{speed:,.0f} glyphs/s, loss {loss:.2f}"
        if self.validation:
            shown += f", validation rank-1 {100 * self.validation[-1][1]:.1f} %"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(min(self.seconds[-1], self.options.seconds) - bar.n)

    def validated(self, value: float) -> None:
        """Notes a validation rank-1."""
        self.validation.append((self.elapsed(), value))

    def write(self) -> None:
        """Writes `log.json`."""
        options = dataclasses.asdict(self.options)
        log = {
            "options": options,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "ranks": dist.get_world_size(),
            "designs": self.designs,
            "compile_seconds": self.compile_seconds,
            "images": self.images,
            "images_per_second": self.images / self.seconds[-1],
            "resumed": self.resumed,
            "seconds": self.seconds,
            "loss": self.loss,
            "validation": self.validation,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "log.json").write_text(json.dumps(log, default=str) + "\n")
