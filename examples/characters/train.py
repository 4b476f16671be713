r"""Trains the network: one process per rank, started by torchrun.

    torchrun --standalone --nproc-per-node 2 -m examples.characters.train --seconds 120

On several machines, give each the glyphs (`python -m examples.characters.glyphs`, or a shared
`--cache`) and start on each, with torchrun's own flags:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m examples.characters.train --seconds 120

with `--out` on a file system that they share, then `python -m examples.characters.report`.

The backbone is replicated under DDP; the head, `torch_pfc.PartialFC`, holds each class on one rank
and is not wrapped. Both are called in one compiled function from images to loss. Rank 0's clock
rules: it hands every rank the progress at each step, from which the learning rate and the end
follow. The last model is the result; nothing is picked. A training that is interrupted goes on
where it was when it is started again, on any number of ranks (`resume.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_pfc

from . import data, fonts, glyphs
from .evaluate import gallery_rows, probe_rows, rank1
from .glyphs import Glyphs
from .log import Log
from .model import EMBEDDING_DIM, Backbone, embed, to_float
from .options import Options, num_cpus, parse
from .resume import Keeper, Stop, check
from .terminal import Failure, guarded, say

# Chosen on validation characters in short trials, with UKai kept out of training as the unseen typeface.
MARGIN = 0.1
SCALE = 16.0
BACKBONE_LR, BACKBONE_DECAY = 3e-3, 0.05
HEAD_LR = 5e-3
WARM_UP = 0.05  # of the time; afterwards the rates fall linearly to 0
NUM_VALIDATIONS = 5  # on the way; another at the end
NUM_PROBES = 500  # of a validation, which takes rank 0 half a second of training time
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_compiler(options: Options) -> None:
    """Says early that torch.compile cannot work here.

    Raises:
        Failure: no C++ compiler or no Python headers, which TorchInductor needs on a CPU.
    """
    if not options.compile or torch.cuda.is_available():
        return
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = [] if shutil.which(compiler) else [f"the C++ compiler {compiler}"]
    lacking += [] if header.exists() else [f"the Python headers ({header})"]
    if lacking:
        raise Failure(
            f"torch.compile needs {' and '.join(lacking)}, not found on this machine; install "
            "them (Debian: g++, python3-dev), or train uncompiled and slower with --no-compile"
        )


def rate(progress: float) -> float:
    """The part of the full rate to use at `progress` (0..1) of the training time."""
    return min(progress / WARM_UP, 1.0) * max(1.0 - progress, 0.0)


class Step(nn.Module):
    """From images to loss, as one function to compile and for DDP to wrap.

    The backbone is a submodule, so DDP keeps it equal on all ranks. The criterion is a plain
    function: its parameters, a different shard on each rank, are none of DDP's business.
    """

    def __init__(self, backbone: Backbone, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Keeps the backbone as a submodule, the criterion as a mere attribute."""
        super().__init__()
        self.backbone = backbone
        self.criterion = criterion

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Images [B, 1, 40, 40] in 0..1, labels [B] to the loss of the group's batch."""
        return self.criterion(self.backbone(images), labels)


def main(argv: list[str] | None = None) -> None:
    """Joins the group that torchrun made, trains; rank 0 writes `model.pt` and `log.json`."""
    options = parse(argv, "examples.characters.train")
    if "LOCAL_RANK" not in os.environ:
        raise Failure("start training by torchrun: torchrun --standalone --nproc-per-node 2 -m ...")
    check_compiler(options)
    check(options)
    stop = Stop()
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, num_cpus() // local_size))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        _train(options, device, stop)
    except (Exception, KeyboardInterrupt):
        if not stop.asked:
            raise
    finally:
        dist.destroy_process_group()
    if stop.asked:  # what else went wrong on the way out is a rank that was faster; who sent the signal says the rest
        sys.exit(130)


def _train(options: Options, device: torch.device, stop: Stop) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    known = glyphs.load(options)
    gallery, _, designs = fonts.roles(known.names, options)
    parts = data.split(known.num_identities)

    torch.manual_seed(options.seed)  # the same weights on every rank
    backbone = Backbone().to(device)
    head = torch_pfc.PartialFC(
        EMBEDDING_DIM,
        len(parts.train),
        margin=torch_pfc.CosFace(MARGIN),
        scale=SCALE,
        sample_rate=options.sample_rate,
        device=device,
    )
    step = Step(backbone, lambda embeddings, labels: head(embeddings, labels))
    if options.compile:
        step.compile(fullgraph=True)
    devices = [device.index] if device.type == "cuda" else None
    replicas = DistributedDataParallel(step, device_ids=devices)
    optimizer = torch.optim.AdamW(
        [
            {"params": backbone.parameters(), "lr": BACKBONE_LR, "weight_decay": BACKBONE_DECAY},
            {"params": head.parameters(), "lr": HEAD_LR, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        fused=True,
    )
    full_rates = [group["lr"] for group in optimizer.param_groups]
    scaler = torch_pfc.GradScaler(device.type, enabled=options.precision == "fp16")
    autocast = torch.autocast(device.type, DTYPES[options.precision], enabled=options.precision != "fp32")

    def backward(source: Iterator[tuple[Tensor, Tensor]]) -> float:
        images, labels = next(source)
        # Not compiled: fused into the sampling, the stroke weights would be computed anew for each of its corners.
        varied = data.augment(to_float(images.to(device)))
        with autocast:
            loss: Tensor = replicas(varied, labels.to(device))
        scaler.scale(loss).backward()
        return float(loss.detach())

    def source(num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches and variations of their own on each rank, and for what is left after `num_steps`."""
        torch.manual_seed((options.seed + num_steps) * size + rank + 1)
        return data.batches(known, parts.train, designs, options.batch, (options.seed, num_steps, rank))

    begun = time.monotonic()
    if rank == 0:
        say("  compiling" if options.compile else "  first steps")
    trial = source(0)
    for _ in range(2):  # gradients thrown away: nothing is learnt outside the time
        backward(trial)
        optimizer.zero_grad()
    dist.barrier()

    compiled = time.monotonic() - begun
    if rank == 0:
        say(f"  {compiled:.1f} s")
    watch = _Watch(known, parts, gallery, designs)
    log = Log(options, [known.names[design] for design in designs], compiled)
    keeper = Keeper(options, head, optimizer, backbone, scaler=scaler, log=log)
    keeper.begin()
    if rank == 0 and log.resumed:
        say(f"  goes on after {log.elapsed():.1f} of {options.seconds:g} s, {len(log.loss)} steps")
    batches = source(len(log.loss))
    stop.steps = True
    saved = log.elapsed()
    with log.bar() as bar:
        while (now := _agree(log.elapsed() / options.seconds, log.elapsed() - saved, stop.asked, device)).progress < 1:
            if now.stop or now.unsaved >= options.save_every:
                keeper.save()
                saved = log.elapsed()
            if now.stop:
                break
            for group, full in zip(optimizer.param_groups, full_rates, strict=True):
                group["lr"] = full * rate(now.progress)
            loss = backward(batches)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if rank == 0:
                log.step(bar, loss)
                if now.progress >= (len(log.validation) + 1) / (NUM_VALIDATIONS + 1):
                    log.validated(watch.rank1(backbone))
    finished = now.progress >= 1
    if rank == 0 and finished:
        log.validated(watch.rank1(backbone))
        log.write()
        torch.save(backbone.state_dict(), options.out / "model.pt")
    keeper.close(finished=finished)
    if rank == 0 and not finished:
        say(f"  stopped after {saved:.1f} of {options.seconds:g} s; the same command goes on from there")


class Now(NamedTuple):
    """Where the training is, the same on every rank: they take the same rates, save and stop at the same step."""

    progress: float  # 0..1, by rank 0's clock
    unsaved: float  # seconds since the last checkpoint, by rank 0's clock
    stop: bool  # whether any rank was told to


def _agree(progress: float, unsaved: float, stop: bool, device: torch.device) -> Now:
    mine = [progress, unsaved, stop] if dist.get_rank() == 0 else [0.0, 0.0, stop]
    shared = torch.tensor(mine, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    progress, unsaved, stopped = shared.tolist()
    return Now(progress, unsaved, bool(stopped))


class _Watch:
    """Rank-1 of validation characters in training typefaces, up to `NUM_PROBES` probes."""

    def __init__(self, known: Glyphs, parts: data.Split, gallery: int, designs: list[int]) -> None:
        self.known = known
        self.gallery = gallery_rows(known, parts.validate, gallery)
        rows = np.concatenate([probe_rows(known, parts.validate, d, self.gallery) for d in designs if d != gallery])
        self.probes = np.random.default_rng(data.SPLIT_SEED).permutation(rows)[:NUM_PROBES]

    def rank1(self, backbone: Backbone) -> float:
        """Part of the probes recognised, 0..1."""
        images, ids = self.known.images, torch.from_numpy(self.known.identity)
        probes, gallery = (embed(backbone, images, rows) for rows in (self.probes, self.gallery))
        return rank1(probes, ids[self.probes], gallery, ids[self.gallery])


if __name__ == "__main__":
    guarded(main)
