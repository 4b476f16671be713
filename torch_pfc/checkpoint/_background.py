"""Writing beside the training: one thread and one group of its own for each group of heads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch.distributed as dist

from ..ops import _group
from ..ops._group import Group


class Background:
    """Runs one job at a time in a thread.

    Attributes:
        group: the ranks of the head's group, by themselves: the training's collectives go on in the other one.
    """

    def __init__(self, group: Group) -> None:
        self.group = _group.gloo_twin(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch_pfc.checkpoint")
        self._last: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        self._last = self._thread.submit(job)
        return self._last

    def finish(self) -> None:
        """Waits for the last job. If it failed, its own future says so."""
        if self._last is not None:
            wait([self._last])


_alone = Background(_group.ALONE)
# A group's lasts as long as the group.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Background] = weakref.WeakKeyDictionary()


def of(group: Group) -> Background:
    """The background of `group`; the first call is collective."""
    process_group = _group.process_group(group)
    if process_group is None:
        return _alone
    if process_group not in _of_group:
        _of_group[process_group] = Background(group)
    return _of_group[process_group]


def finish(group: Group) -> None:
    """Waits for what runs in the background of `group`, if anything does."""
    process_group = _group.process_group(group)
    background = _alone if process_group is None else _of_group.get(process_group)
    if background is not None:
        background.finish()
