"""SparseSGD and SparseAdamW as optimizers of torch.optim: options, state, gradients of every kind."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_pfc.optim import SparseAdamW, SparseSGD

from .tiles import tiles_of

Make = Callable[..., Optimizer]

PAIRS: list[tuple[Make, Make, dict[str, Any]]] = [
    (SparseSGD, torch.optim.SGD, {}),
    (SparseSGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (SparseSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (SparseAdamW, torch.optim.AdamW, {}),
    (SparseAdamW, torch.optim.AdamW, {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
]
pairs = pytest.mark.parametrize("ours, theirs, options", PAIRS)
both = pytest.mark.parametrize("make", [lambda p, **o: SparseSGD(p, momentum=0.9, **o), SparseAdamW])


def sparse(rows: list[int], values: Tensor, num_rows: int) -> Tensor:
    size, coalesced = (num_rows, *values.shape[1:]), rows == sorted(set(rows))
    indices = torch.tensor([rows], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=True)


def parameters() -> list[nn.Parameter]:
    """A backbone's of all shapes, and a head's."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (3,), (4, 3), (2, 3, 3, 3), (10, 4)]
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    found[3].data = found[3].data.to(memory_format=torch.channels_last)
    return found


def give_gradients(params: list[nn.Parameter], step: int, head_is_sparse: bool) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    head = params[-1]
    if head_is_sparse and head.grad is not None:
        head.grad = sparse(list(range(10)), head.grad, 10)


def train(optimizer: Optimizer, params: list[nn.Parameter], steps: range, head_is_sparse: bool) -> None:
    for step in steps:
        give_gradients(params, step, head_is_sparse)
        optimizer.step()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pairs
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=["number", "scalar", "vector"])
def test_gradients_of_all_rows_give_torchs_bits(ours: Make, theirs: Make, options: dict[str, Any], lr: Any) -> None:
    """Parameters of any shape and state alike; the head's gradient sparse, and dense."""
    expected = parameters()
    reference = theirs(expected, lr=lr, foreach=False, **options)
    train(reference, expected, range(5), False)
    for head_is_sparse in (True, False):
        found = parameters()
        optimizer = ours(found, lr=lr, **options)
        with tiles_of(8):
            train(optimizer, found, range(5), head_is_sparse)
        assert_same(found, expected)
        assert_same(optimizer.state_dict()["state"], reference.state_dict()["state"])


@pairs
def test_state_dicts_are_torchs(ours: Make, theirs: Make, options: dict[str, Any]) -> None:
    """Either way in the middle of a run, which goes on as if nothing had happened."""
    expected = parameters()
    train(theirs(expected, lr=0.1, foreach=False, **options), expected, range(4), False)
    for first, second in [(ours, theirs), (theirs, ours)]:
        found = parameters()
        before = first(found, lr=0.1, **options)
        train(before, found, range(2), False)
        after = second(found, lr=7.0, **options)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        for group in after.param_groups:
            group["foreach"] = False
        train(after, found, range(2, 4), False)
        assert_same(found, expected)


@both
def test_a_run_goes_on_from_a_saved_or_copied_optimizer(make: Make) -> None:
    expected = parameters()
    train(make(expected), expected, range(4), True)

    def through_a_file(optimizer: Optimizer, params: list[nn.Parameter]) -> tuple[Optimizer, list[nn.Parameter]]:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        fresh = make(params)
        fresh.load_state_dict(torch.load(file))
        return fresh, params

    for through in (
        through_a_file,
        lambda *pair: copy.deepcopy(pair),
        lambda *pair: pickle.loads(pickle.dumps(pair)),
    ):
        found = parameters()
        optimizer = make(found)
        train(optimizer, found, range(2), True)
        optimizer, found = through(optimizer, found)
        train(optimizer, found, range(2, 4), True)
        assert_same(found, expected)


def test_an_amsgrad_state_is_refused() -> None:
    params = parameters()
    optimizer = SparseAdamW(params)
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.load_state_dict(amsgrad.state_dict())


@pytest.mark.cuda
def test_a_fused_state_counts_on_the_host() -> None:
    param = nn.Parameter(torch.ones(3, device="cuda"))
    fused, optimizer = torch.optim.AdamW([param], fused=True), SparseAdamW([param])
    param.grad = torch.ones(3, device="cuda")
    fused.step()
    optimizer.load_state_dict(fused.state_dict())
    optimizer.step()
    step = optimizer.state[param]["step"]
    assert step.device.type == "cpu" and step == 2


@both
def test_groups_with_their_own_options_and_one_added_later(make: Make) -> None:
    a, b, c = (nn.Parameter(torch.ones(4, 2)) for _ in range(3))
    optimizer = make([{"params": [a], "lr": 0.1}, {"params": [b], "weight_decay": 0.5}], lr=0.2)
    optimizer.add_param_group({"params": [c], "lr": 0.0})
    for param in (a, b, c):
        param.grad = sparse([1], torch.ones(1, 2), 4)
    optimizer.step()
    for param, lr, decay in [(a, 0.1, 0.0), (b, 0.2, 0.5)]:
        alone = nn.Parameter(torch.ones(4, 2))
        alone.grad = sparse([1], torch.ones(1, 2), 4)
        make([alone], lr=lr, **({"weight_decay": decay} if decay else {})).step()
        assert_same(param, alone)
    assert torch.equal(c, torch.ones(4, 2)) and optimizer.state[c]


@both
def test_named_parameters(make: Make) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    optimizer = make(module.named_parameters())
    module(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight"]


@both
def test_closures_hooks_and_zero_grad(make: Make) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = make(embedding.parameters())
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Any:
        called.append("closure")
        optimizer.zero_grad()
        loss = embedding(torch.tensor([1, 3])).sum()
        loss.backward()
        return loss

    before = embedding.weight.detach().clone()
    loss: Any = optimizer.step(closure)
    assert loss.requires_grad and called == ["before", "closure", "after"]
    assert (embedding.weight != before).any(dim=1).tolist() == [False, True, False, True]
    optimizer.zero_grad()
    assert embedding.weight.grad is None
    assert optimizer.step() is None  # no gradient: no step of the parameter
    if "step" in optimizer.state[embedding.weight]:
        assert optimizer.state[embedding.weight]["step"] == 1


@both
@pytest.mark.parametrize("lr", [float, torch.tensor], ids=["number", "tensor"])
def test_learning_rate_schedulers(make: Make, lr: Callable[[float], Any]) -> None:
    param = nn.Parameter(torch.zeros(1, 1))
    optimizer = make([param], lr=lr(0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    for moved in (True, False):
        before = param.detach().clone()
        param.grad = sparse([0], torch.ones(1, 1), 1)
        optimizer.step()
        scheduler.step()
        assert bool((param != before).all()) == moved


@both
def test_uncoalesced_gradients_add_up(make: Make) -> None:
    values = torch.randn(4, 3)
    found, expected = (nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    found.grad = sparse([4, 1, 4, 0], values, 5)
    expected.grad = sparse([0, 1, 4], torch.stack([values[3], values[1], values[0] + values[2]]), 5)
    for param in (found, expected):
        make([param]).step()
    assert_same(found, expected)


@both
def test_the_gradient_and_the_graph_are_left_alone(make: Make) -> None:
    param = nn.Parameter(torch.ones(5, 3))
    param.grad = sparse([1, 4], torch.ones(2, 3), 5)
    optimizer = make([param], maximize=True, weight_decay=0.1)
    version = param._version
    optimizer.step()
    assert torch.equal(param.grad.values(), torch.ones(2, 3)) and param.grad.is_coalesced()
    assert param.is_leaf and param.requires_grad and param._version > version  # a stale graph's backward would raise


@both
def test_gradients_that_no_row_has(make: Make) -> None:
    """An empty shard, and no rows of a shard: no value changes, the step counts."""
    for num_rows in (0, 4):
        param = nn.Parameter(torch.ones(num_rows, 3))
        optimizer = make([param])
        param.grad = sparse([], torch.ones(0, 3), num_rows)
        optimizer.step()
        assert torch.equal(param, torch.ones(num_rows, 3)) and optimizer.state[param]


def bad_gradients() -> list[tuple[nn.Parameter, str]]:
    matrix, cube, complex_ = (
        nn.Parameter(torch.ones(2, 3).to_sparse()),
        nn.Parameter(torch.ones(2, 3, 4)),
        nn.Parameter(torch.ones(2, 3, dtype=torch.complex64)),
    )
    matrix.grad = torch.ones(2, 3).to_sparse(1)
    cube.grad = torch.ones(2, 3, 4).to_sparse(2)
    complex_.grad = torch.ones(2, 3, dtype=torch.complex64)
    return [
        (matrix, r"got a torch.float32 torch.sparse_coo parameter \[2, 3\]"),
        (cube, r"parameter \[2, 3, 4\] with a torch.sparse_coo gradient with 2 sparse dimensions"),
        (complex_, r"got a torch.complex64 torch.strided parameter \[2, 3\]"),
    ]


@both
def test_gradients_that_are_not_supported_are_named(make: Make) -> None:
    for param, says in bad_gradients():
        with pytest.raises(TypeError, match=says):
            make([param]).step()


@pytest.mark.parametrize(
    "make, options, says",
    [
        (SparseSGD, {"lr": -0.1}, "lr must not be negative, got -0.1"),
        (SparseSGD, {"lr": torch.ones(2)}, r"lr must have one element, got \[2\]"),
        (SparseSGD, {"momentum": -0.1}, "momentum must not be negative, got -0.1"),
        (SparseSGD, {"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
        (SparseSGD, {"nesterov": True}, "got momentum=0 and dampening=0"),
        (SparseSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "got momentum=0.9 and dampening=0.1"),
        (SparseAdamW, {"lr": -0.1}, "lr must not be negative, got -0.1"),
        (SparseAdamW, {"lr": float("nan")}, "lr must not be negative, got nan"),
        (SparseAdamW, {"betas": (1.0, 0.9)}, r"betas must lie in \[0, 1\), got 1.0 at index 0"),
        (SparseAdamW, {"betas": (0.9, -0.1)}, r"betas must lie in \[0, 1\), got -0.1 at index 1"),
        (SparseAdamW, {"eps": -0.1}, "eps must not be negative, got -0.1"),
        (SparseAdamW, {"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
    ],
)
def test_options_out_of_range(make: Make, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make([nn.Parameter(torch.ones(1))], **options)


@both
@pytest.mark.parametrize("is_sparse", [True, False])
def test_a_step_allocates_tiles_and_nothing_larger(make: Make, is_sparse: bool) -> None:
    """Beside the state, which the first step makes."""
    param = nn.Parameter(torch.randn(4096, 64))
    grad = torch.randn(2048 if is_sparse else 4096, 64)
    param.grad = sparse(list(range(0, 4096, 2)), grad, 4096) if is_sparse else grad
    optimizer = make([param], maximize=True, weight_decay=0.1)
    optimizer.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tiles_of(4096), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        optimizer.step()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 4096 * 4  # [S, D] is 32 times that
