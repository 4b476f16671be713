"""pfc::sharded_lse_saving and pfc::sharded_lse_update by the contracts of PyTorch's operators. What a head does with
them: test_saved_logits.py, test_fuse.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_pfc  # noqa: F401  registers the operators

from .inputs import IGNORE
from .ranks import run_ranks
from .test_ops_gather import ALONE, world
from .test_ops_sharded_lse import draw

pfc = torch.ops.pfc
DIM = 4
SGD, ADAMW = ("sgd", [0.9, 0.1, 1.0, 0.0]), ("adamw", [0.9, 0.99, 1e-8, 0.1, 0.0])


def operands(num_rows: int, num_classes: int, num_sampled: int | None) -> tuple[Any, ...]:
    """embeddings, weight, index, target; both of the first ask for gradients."""
    dtype = torch.bfloat16 if num_sampled == 10 else torch.float32
    labels = torch.arange(num_rows) % max(num_classes, 1) if num_classes else torch.full((num_rows,), IGNORE)
    index, target, _ = draw(labels, num_classes, num_sampled)
    weight = torch.randn(num_classes, DIM, requires_grad=True)
    return torch.randn(num_rows, DIM).to(dtype).requires_grad_(), weight, index, target


# All classes; sampled; padding, which 8 rows of 10 classes leave at 2; one row; an empty shard.
SIZES = [(8, 40, None), (4, 40, 10), (8, 10, 2), (1, 10, 0), (8, 0, None)]


def update_of(rule: tuple[str, list[float]], weight: Tensor) -> tuple[str, list[Tensor], Tensor, list[float]]:
    """rule, state, lr, options."""
    name, options = rule
    state = [torch.rand_like(weight, requires_grad=False) for _ in range(1 if name == "sgd" else 2)]
    return name, [*state, *([torch.tensor(3.0)] if name == "adamw" else [])], torch.tensor(0.1), options


def check_saving(sizes: list[Any], group: tuple[str, int, int] | None = None) -> None:
    group = group or world()
    for num_rows, num_classes, num_sampled in sizes:
        x, w, index, target = operands(num_rows * group[1], num_classes, num_sampled)
        three = 3 * 4 * (len(x) + 1) + 1
        for sparse_grad, saved_bytes in [(False, 0), (True, three), (False, 1 << 20)]:  # none, three, all
            arguments = (x, w, index, target, True, *group, sparse_grad, saved_bytes)
            torch.library.opcheck(pfc.sharded_lse_saving.default, arguments)


def check_update(
    sizes: list[Any], rule: tuple[str, list[float]], scaled: bool, group: tuple[str, int, int] | None = None
) -> None:
    group = group or world()
    scale = torch.tensor(8.0) if scaled else None
    for num_rows, num_classes, num_sampled in sizes:
        x, w, index, target = operands(num_rows * group[1], num_classes, num_sampled)
        w, update = w.detach(), update_of(rule, w)
        arguments = (x, w, index, target, True, *group, 3 * 4 * len(x), *update, scale)
        torch.library.opcheck(pfc.sharded_lse_update.default, arguments)
        logits = pfc.sharded_lse_update(*arguments)[2].detach()
        backward = (x.detach(), w, index, target, True, torch.rand(len(x), 3), 1 / group[1], logits, *update, scale)
        torch.library.opcheck(pfc.sharded_lse_update_backward_.default, backward)


def test_opcheck_alone() -> None:
    check_saving(SIZES, ALONE)
    check_update(SIZES, SGD, False, ALONE)
    check_update(SIZES[1:3], SGD, True, ALONE)
    check_update(SIZES[1:], ADAMW, False, ALONE)


def test_opcheck_on_two_ranks() -> None:
    run_ranks(2, check_saving, SIZES[2:3], timeout=120)
    run_ranks(2, check_update, SIZES[2:3], ADAMW, True, timeout=120)


def test_the_schema_names_what_backward_changes() -> None:
    schema = pfc.sharded_lse_update_backward_.default._schema
    assert {argument.name for argument in schema.arguments if argument.is_write} == {"weight", "state"}
    assert not any(argument.is_write for argument in pfc.sharded_lse_update.default._schema.arguments)


def test_a_rule_or_state_that_does_not_fit_is_named() -> None:
    x, w, index, target = operands(4, 10, None)
    for update, says in [
        (("lion", [], torch.tensor(0.1), []), r"\['sgd', 'adamw'\], got 'lion'"),
        (("sgd", [torch.zeros(9, DIM)], torch.tensor(0.1), SGD[1]), r"\[10, 4\], got \[\[9, 4\]\]"),
    ]:
        with pytest.raises(ValueError, match=says):
            pfc.sharded_lse_update(x, w, index, target, True, *ALONE, 0, *update, None)
