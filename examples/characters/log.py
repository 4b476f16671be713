"""What rank 0 notes of a training, shows on a bar, and writes to `log.json` for the report."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from .options import Options
from .terminal import BAR


class Log:
    """What rank 0 notes and shows; the clock starts when it is made."""

    def __init__(self, options: Options, designs: list[str], compile_seconds: float) -> None:
        self.options, self.designs, self.compile_seconds = options, designs, compile_seconds
        self.seconds: list[float] = []
        self.loss: list[float] = []
        self.validation: list[tuple[float, float]] = []
        self.per_step = options.batch * dist.get_world_size()
        self.start = time.monotonic()

    def elapsed(self) -> float:
        """Seconds of training so far, validation included."""
        return time.monotonic() - self.start

    def bar(self) -> tqdm[NoReturn]:
        """Over the seconds of training; silent on other ranks."""
        return tqdm(
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
        speed = len(self.loss) * self.per_step / self.seconds[-1]
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
        images = len(self.loss) * self.per_step
        options = dataclasses.asdict(self.options)
        log = {
            "options": options,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "ranks": dist.get_world_size(),
            "designs": self.designs,
            "compile_seconds": self.compile_seconds,
            "images": images,
            "images_per_second": images / self.seconds[-1],
            "seconds": self.seconds,
            "loss": self.loss,
            "validation": self.validation,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "log.json").write_text(json.dumps(log, default=str) + "\n")
