"""PyTorch's debugging modes over `torch.ops.pfc.*`: importing this module registers the rules that they need.

The collectives of an operator run inside its kernel, below the point at which a dispatch mode looks. With the rules::

    CommDebugMode      counts them
    LocalTensorMode    runs all ranks in one process: each rank's kernel in a thread of its own, on that rank's plain
                       tensors, until all of them wait in the same collective, which the mode then runs over all ranks

The modes are slow to import or private to PyTorch; hence a module of its own, the one place where their names stand.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .ops import _group, gather, sharded_lse, sharded_lse_update, sharded_topk
from .partial_fc import PartialFC

__all__ = ["all_ranks"]


def _private(owner: Any, name: str) -> Any:
    """The attribute of a module, given by its name, or of an object."""
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch_pfc.debug uses {owner}.{name} of PyTorch 2.13, which PyTorch {torch.__version__} does not have: "
            "it was moved or renamed, and torch_pfc/debug.py must follow. The rest of torch_pfc works without it."
        ) from error


_LOCAL_TENSOR = "torch.distributed._local_tensor"
CommDebugMode = _private("torch.distributed.tensor.debug", "CommDebugMode")
LocalTensorMode = _private(_LOCAL_TENSOR, "LocalTensorMode")
LocalTensor = _private(_LOCAL_TENSOR, "LocalTensor")
_enabled_mode = _private(_LOCAL_TENSOR, "enabled_local_tensor_mode")
_on_rank = _private(_LOCAL_TENSOR, "_map_to_rank_local_val")
_combine = _private(_LOCAL_TENSOR, "_combine_rank_results")


@contextlib.contextmanager
def _active(mode: TorchDispatchMode) -> Iterator[None]:
    """Puts a mode back on the stack while its rule runs. Its own `__enter__` would start it afresh: counters at 0."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


_RETURNED, _RAISED = "returned", "raised"


class _Aborted(Exception):
    """Ends the kernels of the other ranks after one has failed."""


class _Rank(TorchDispatchMode):
    """One rank's kernel in a thread; as a mode in that thread it hands collectives to the main thread."""

    def __init__(self, rank: int, kernel: Callable[..., Any], args: Any, reports: queue.SimpleQueue) -> None:
        super().__init__()
        self.rank, self.reports = rank, reports
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(kernel, args), name=f"rank {rank}")
        self.thread.start()

    def _run(self, kernel: Callable[..., Any], args: Any) -> None:
        try:
            with torch.no_grad(), _group.simulated(self.rank), self:
                self.reports.put((self.rank, _RETURNED, kernel(*args)))
        except BaseException as error:
            self.reports.put((self.rank, _RAISED, error))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as LocalTensorMode: PyTorch keeps this flag per process, and threads end in any order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        self.reports.put((self.rank, func, args))
        answer = self.answers.get()
        if isinstance(answer, _Aborted):
            raise answer
        return answer


def _simulate(kernel: Callable[..., Any], ranks: frozenset[int], args: tuple[Any, ...]) -> Any:
    """Runs `kernel` on every rank's part of `args`, and the collectives between them; returns LocalTensors."""
    reports: queue.SimpleQueue = queue.SimpleQueue()
    threads = [
        _Rank(rank, kernel, pytree.tree_map(functools.partial(_on_rank, rank=rank), args), reports)
        for rank in sorted(ranks)
    ]
    try:
        while True:
            # Each rank reports once a round: the collective that it waits in, or its end.
            kinds, values = {}, {}
            for _ in threads:
                rank, kinds[rank], values[rank] = reports.get()
            for rank in sorted(ranks):
                if kinds[rank] is _RAISED:
                    raise values[rank]
            kind, *others = set(kinds.values())
            if others:
                described = {rank: str(kinds[rank]) for rank in sorted(ranks)}
                raise RuntimeError(f"ranks must issue the same collectives, got {described}")
            if kind is _RETURNED:
                return _combine(values, None)
            flat = {rank: pytree.tree_flatten(value) for rank, value in values.items()}
            columns = zip(*(leaves for leaves, _ in flat.values()), strict=True)
            merged = [_combine(dict(zip(flat, column, strict=True)), None) for column in columns]
            result = kind(*pytree.tree_unflatten(merged, flat[threads[0].rank][1]))
            for thread in threads:
                thread.answers.put(_on_rank(result, thread.rank))
    finally:
        for thread in threads:
            thread.answers.put(_Aborted())
            thread.thread.join()


def _check_sparse(args: tuple[Any, ...]) -> None:
    weight = args[1]
    # sparse_grad is the ninth argument; the dispatcher leaves out a last one that equals its default.
    if len(args) >= 9 and args[8] and isinstance(weight.shape[0], torch.SymInt):
        raise NotImplementedError(
            "sparse_grad under LocalTensorMode needs shards of equal size, as a sparse LocalTensor has one shape, got "
            f"{weight.shape[0]} classes: set sparse_grad=False, or make num_classes a multiple of the group's size"
        )


def _register(operator: Any) -> None:
    kernel = _private(operator, "_init_fn")

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        assert not kwargs, "the dispatcher passes the arguments of these schemas by position"
        with _active(mode):
            local = _enabled_mode()
            if local is not None:
                if operator in (sharded_lse.sharded_lse, sharded_lse.sharded_lse_saving):
                    _check_sparse(args)
                return _simulate(kernel, local.ranks, args)
            return kernel(*args)

    for mode_class in (CommDebugMode, LocalTensorMode):
        operator.register_torch_dispatch(mode_class, rule)


for _operator in (
    gather.gather,
    sharded_lse.sharded_lse,
    sharded_lse.sharded_lse_saving,
    sharded_lse_update.sharded_lse_update,
    sharded_topk.sharded_topk,
):
    _register(_operator)


def all_ranks(build: Callable[[], PartialFC]) -> PartialFC:
    """The heads of all ranks of a LocalTensorMode as one.

    Args:
        build: makes a head; called once for each rank, with the same random state.

    Returns:
        A head whose parameters are LocalTensors, and whose rank and classes are, at once, those of every rank.

    Raises:
        RuntimeError: outside of LocalTensorMode.
    """
    mode = _enabled_mode()
    if mode is None:
        raise RuntimeError("all_ranks must be called under LocalTensorMode, which is not active")
    heads = {}
    with mode.disable():
        state = torch.get_rng_state()
        for rank in sorted(mode.ranks):
            torch.set_rng_state(state)
            with _group.simulated(rank):
                heads[rank] = build()

    head = heads[min(heads)]
    for name in ("class_start", "num_local_classes", "num_sampled"):
        setattr(head, name, _combine({rank: getattr(other, name) for rank, other in heads.items()}, None))
    head.group = head.group._replace(rank=_combine({rank: other.group.rank for rank, other in heads.items()}, None))
    for name, parameter in list(head.named_parameters()):
        local = LocalTensor({rank: other.get_parameter(name).detach() for rank, other in heads.items()})
        module, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(module), leaf, nn.Parameter(local, requires_grad=parameter.requires_grad))
    return head
