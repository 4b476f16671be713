"""What happens to a head between its steps: copied, saved, converted, moved, frozen, emptied and drawn anew."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_pfc
from torch_pfc._shards import group_of

from .inputs import Batch, make_head, random_batch, relative_error
from .ranks import run_ranks

BATCH = random_batch(6, 40, 8, scale=8.0, seed=11)
KEY = torch.tensor(3)


class LengthMargin(nn.Module):
    """A margin with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.tensor(0.2))
        self.register_buffer("length", torch.tensor(2.0))

    def forward(self, cosine: Tensor, embeddings: Tensor, labels: Tensor) -> Tensor:
        return cosine - self.m * (embeddings.detach().norm(dim=1) > self.length)


def make(sparse_grad: bool = True, margin: Any = None, scale: Any = 8.0) -> torch_pfc.PartialFC:
    batch = Batch(BATCH.embeddings, BATCH.weight, BATCH.labels, scale)
    return make_head(batch, torch.float32, sample_rate=0.3, sparse_grad=sparse_grad, margin=margin or LengthMargin())


def check_alive(head: torch_pfc.PartialFC, rtol: float = 1e-6) -> None:
    """It gives the loss and gradient that a fresh head of the same weight gives, and a step of SGD moves it."""
    head.zero_grad()
    assert type(head.weight) is nn.Parameter and group_of(head.weight) == head.group
    right = make(sparse_grad=False, margin=head.margin, scale=head.scale)
    with torch.no_grad():
        right.weight.copy_(head.weight)
    # PyTorch cannot add sparse gradients of float16 on the CPU; all others add up over two steps.
    num_steps = 1 if head.sparse_grad and head.weight.dtype == torch.float16 else 2
    for one in (head, right):
        for _ in range(num_steps):
            loss = one(BATCH.embeddings.float().to(one.weight.device), BATCH.labels.to(one.weight.device), key=KEY)
            loss.backward()
    expected = right(BATCH.embeddings.float(), BATCH.labels, key=KEY)
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    grad, right_grad = head.weight.grad, right.weight.grad
    assert grad is not None and right_grad is not None
    assert grad.dtype == head.weight.dtype and grad.is_sparse == head.sparse_grad
    assert not grad.is_sparse or grad.is_coalesced()
    assert relative_error(grad.detach().cpu().to_dense(), right_grad) < rtol
    before = head.weight.detach().clone()
    torch.optim.SGD([head.weight], lr=1.0).step()
    assert not torch.equal(head.weight, before) and head.weight.isfinite().all()


def saved(head: torch_pfc.PartialFC) -> torch_pfc.PartialFC:
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    loaded: torch_pfc.PartialFC = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[torch_pfc.PartialFC], torch_pfc.PartialFC]] = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda head: pickle.loads(pickle.dumps(head)),
    "torch.save": saved,
    "in a container": lambda head: copy.deepcopy(nn.ModuleDict({"head": head}))["head"],  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_as_its_original(name: str, sparse_grad: bool) -> None:
    original = make(sparse_grad, scale=nn.Parameter(torch.tensor(8.0)))
    copied = COPIES[name](original)
    assert torch.equal(copied.weight, original.weight)
    assert (copied.weight is original.weight) == (name == "copy.copy")
    check_alive(copied)
    check_alive(original)


def test_a_copy_of_a_copy_has_its_hooks_once() -> None:
    """copy.copy shares the weight, and a hook more at each would be run at each step."""
    head = make()
    hooks = head.weight._post_accumulate_grad_hooks
    for _ in range(3):
        copy.copy(head)
    head.weight = head.weight
    assert len(hooks) == 1


def test_a_pickled_weight_gets_new_hooks() -> None:
    """A Parameter is pickled with its attributes, but without its hooks."""
    head = make()
    head.weight = pickle.loads(pickle.dumps(head.weight))
    check_alive(head)


CONVERSIONS: dict[str, tuple[Callable[[torch_pfc.PartialFC], Any], torch.dtype, float]] = {
    "half": (lambda head: head.half(), torch.float16, 2e-3),
    "bfloat16": (lambda head: head.bfloat16(), torch.bfloat16, 2e-2),
    "double": (lambda head: head.double(), torch.float64, 1e-6),
    "to(dtype)": (lambda head: head.to(torch.bfloat16), torch.bfloat16, 2e-2),
    "to(device)": (lambda head: head.to("cpu"), torch.float32, 1e-6),
    "share_memory": (lambda head: head.share_memory(), torch.float32, 1e-6),
    "apply": (lambda head: head.apply(lambda module: None), torch.float32, 1e-6),
}


@pytest.fixture(params=["data", "swap", "overwrite"])
def conversion(request: pytest.FixtureRequest) -> Iterator[str]:
    """The three ways in which Module.to may give a parameter its new content."""
    setters: dict[str, Callable[[bool], None]] = {
        "swap": torch.__future__.set_swap_module_params_on_conversion,
        "overwrite": torch.__future__.set_overwrite_module_params_on_conversion,
    }
    chosen = setters.get(request.param, lambda on: None)
    chosen(True)
    yield request.param
    chosen(False)


@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_head_trains(name: str, sparse_grad: bool, conversion: str) -> None:
    """Between two steps, with a gradient in place; the weight's dtype is its own, whatever the embeddings'."""
    convert, dtype, rtol = CONVERSIONS[name]
    head = make(sparse_grad)
    check_alive(head)
    if name == "share_memory":
        head.zero_grad()  # a sparse gradient cannot be shared
    before = head.weight
    convert(head)
    assert head.weight.dtype == dtype
    assert conversion == "overwrite" or head.weight is before
    check_alive(head, rtol)


@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_a_head_from_the_meta_device_is_one_built_directly(sparse_grad: bool, conversion: str) -> None:
    def build() -> torch_pfc.PartialFC:
        return torch_pfc.PartialFC(8, 40, scale=8.0, sample_rate=0.3, sparse_grad=sparse_grad)

    torch.manual_seed(5)
    direct = build()
    with torch.device("meta"):
        head = build()
    assert head.weight.is_meta
    head.to_empty(device="cpu")
    torch.manual_seed(5)
    head.reset_parameters()
    assert torch.equal(head.weight, direct.weight)
    check_alive(head)
    head.to("meta").to_empty(device="cpu").reset_parameters()
    check_alive(head)


def test_a_weight_may_be_frozen_first_and_trained_later() -> None:
    head = make()
    for replace in (False, True):
        if replace:
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        head.requires_grad_(False)
        assert not head(BATCH.embeddings.float(), BATCH.labels).requires_grad
        frozen = copy.deepcopy(head)
        assert not frozen.weight.requires_grad
        for unfrozen in (head, frozen):
            unfrozen.requires_grad_(True)
            check_alive(unfrozen)


def test_a_gradient_that_was_not_coalesced_is_not_called_so() -> None:
    """Rows that stand twice in it would be counted once."""
    head = make()
    size = head.weight.shape
    head.weight.grad = torch.sparse_coo_tensor(torch.tensor([[5, 5]]), torch.ones(2, 8), size, check_invariants=True)
    head(BATCH.embeddings.float(), BATCH.labels, key=KEY).backward()
    assert not head.weight.grad.is_coalesced()
    mixed = head.weight.grad.to_dense()
    head.zero_grad()
    head(BATCH.embeddings.float(), BATCH.labels, key=KEY).backward()
    alone = head.weight.grad.to_dense()
    alone[5] += 2
    torch.testing.assert_close(mixed, alone)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_a_state_dict_loads_strictly(sparse_grad: bool, assign: bool) -> None:
    source = make(sparse_grad, scale=nn.Parameter(torch.tensor(8.0)))
    target = make(sparse_grad, scale=nn.Parameter(torch.tensor(1.0)))
    target.reset_parameters()
    assert sorted(source.state_dict()) == ["margin.length", "margin.m", "scale", "weight"]
    target.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert torch.equal(target.weight, source.weight) and target.scale == 8
    check_alive(target)


def test_functional_call_takes_another_weight_and_puts_the_own_one_back() -> None:
    head, weight = make(sparse_grad=False), torch.randn(40, 8, requires_grad=True)
    own = head.weight
    other = make(sparse_grad=False, margin=head.margin)
    with torch.no_grad():
        other.weight.copy_(weight)
    loss = torch.func.functional_call(head, {"weight": weight}, (BATCH.embeddings.float(), BATCH.labels), {"key": KEY})
    assert loss == other(BATCH.embeddings.float(), BATCH.labels, key=KEY)
    assert head.weight is own
    check_alive(head)


def late_shard(num_classes: int) -> Tensor:
    """This rank's classes: built on the meta device, drawn under a seed, pickled and converted."""
    with torch.device("meta"):
        head = torch_pfc.PartialFC(8, num_classes)
    head.to_empty(device="cpu")
    torch.manual_seed(7)
    head.reset_parameters()
    head = pickle.loads(pickle.dumps(head)).double()
    assert group_of(head.weight) == head.group and head.group.size == dist.get_world_size()
    return head.weight.detach()


@pytest.mark.parametrize("num_classes", [3, 1500], ids="C={}".format)
def test_shards_from_the_meta_device_are_the_whole_matrix(num_classes: int) -> None:
    """Also with empty shards, and where shards end within a block of the draw."""
    torch.manual_seed(7)
    expected = torch_pfc.PartialFC(8, num_classes).weight.detach()
    for world_size in (2, 4):
        assert torch.equal(torch.cat(run_ranks(world_size, late_shard, num_classes)).float(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("sparse_grad", [False, True], ids=["dense", "sparse"])
def test_a_head_that_is_moved_trains(sparse_grad: bool, conversion: str) -> None:
    head = make(sparse_grad)
    check_alive(head)
    assert head.to("cuda").weight.is_cuda
    check_alive(head, 1e-4)
    assert not head.to("cpu").weight.is_cuda
    check_alive(head)
    check_alive(head.to("cuda", torch.bfloat16), 2e-2)
