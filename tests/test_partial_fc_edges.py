"""The module at the edges of its promises: small losses, zeros, a learned scale, seeds, replay, half weights."""

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_pfc
from torch_pfc import reference

from .inputs import Step, assemble, even, head_step, make_head, my_rows, random_batch, relative_error, run_head, s1
from .ranks import run_ranks


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_small_losses_keep_their_relative_accuracy(dtype: torch.dtype, rtol: float) -> None:
    """One row on its centre, three centres at right angles, s = 40: log(1 + 3 exp(-40)), not 0."""
    axes = torch.eye(4, dtype=dtype)
    head = torch_pfc.PartialFC(4, 4, margin=None, scale=40.0, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(axes)
    x = axes[:1].clone().requires_grad_()
    loss = head(x, torch.tensor([0]))
    loss.backward()
    right = torch.tensor(3 * 4.248354255291589e-18, dtype=torch.float64)
    torch.testing.assert_close(loss.double(), right, rtol=rtol, atol=0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 1:].double(), (40 * right / 3).expand(3), rtol=rtol, atol=0)


def step_with_learned_scale() -> tuple[Tensor, Tensor]:
    batch, counts = s1(), even(8, dist.get_world_size())
    scale = nn.Parameter(torch.tensor(batch.scale, dtype=torch.float64))
    batch.scale = scale  # type: ignore[assignment]
    head = make_head(batch, margin=torch_pfc.ArcFace(0.5))
    loss = head(my_rows(batch.embeddings, counts), my_rows(batch.labels, counts))
    return loss.detach(), torch.autograd.grad(loss, scale)[0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_scale_is_learned_as_a_replicated_parameter_under_ddp(world_size: int) -> None:
    """The mean over ranks of its gradients is that of the global mean."""
    batch = s1()
    scale = torch.tensor(batch.scale, dtype=torch.float64, requires_grad=True)
    expected = reference.partial_fc_loss(
        batch.embeddings, batch.weight, batch.labels, margin=reference.arcface(0.5), scale=scale
    )
    expected.backward()
    answers = run_ranks(world_size, step_with_learned_scale)
    assert scale.grad is not None
    torch.testing.assert_close(torch.stack([grad for _, grad in answers]).mean(), scale.grad)
    torch.testing.assert_close(answers[0][0], expected.detach())


@pytest.mark.parametrize("world_size", [0, 2])
def test_a_row_of_zeros_is_finite_and_gets_no_gradient(world_size: int) -> None:
    """It has no direction; dividing by a small constant instead would make its gradient huge."""
    batch = s1()
    batch.embeddings[2] = 0
    step = run_head(world_size, batch, options={"margin": torch_pfc.ArcFace(0.5)})
    assert step.loss.isfinite() and step.weight_grad.isfinite().all()
    assert not step.embeddings_grad[2].any() and step.embeddings_grad[3].any()


def test_a_centre_of_zeros_is_finite_and_gets_no_gradient() -> None:
    batch = s1()
    batch.weight[2] = 0
    step = run_head(0, batch, options={"margin": torch_pfc.ArcFace(0.5)}, dtype=torch.float32)
    assert all(t.isfinite().all() for t in (step.loss, step.embeddings_grad, step.weight_grad))
    assert not step.weight_grad[2].any() and step.weight_grad[3].any()


def test_a_half_precision_weight() -> None:
    batch = random_batch(6, 12, 16, scale=8.0, seed=5)
    step = run_head(0, batch, options={"margin": None}, dtype=torch.float32, weight_dtype=torch.bfloat16)
    x, w = batch.embeddings.requires_grad_(), batch.weight.bfloat16().double().requires_grad_()
    loss = reference.partial_fc_loss(x, w, batch.labels, scale=batch.scale)
    loss.backward()
    assert x.grad is not None and w.grad is not None and step.weight_grad.dtype == torch.bfloat16
    assert float(step.loss) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert relative_error(step.embeddings_grad, x.grad) < 1e-4
    assert relative_error(step.weight_grad, w.grad) < 0.01


def replayed_step(use_checkpoint: bool) -> Step:
    """The key is drawn from the default generator, which checkpointing restores for its second forward."""
    batch, counts = s1(), even(8, dist.get_world_size())
    head = make_head(batch, sample_rate=0.4)
    x, labels = my_rows(batch.embeddings, counts).requires_grad_(), my_rows(batch.labels, counts)[:1].repeat(counts[0])
    torch.manual_seed(3)
    loss = checkpoint(head, x, labels, use_reentrant=False) if use_checkpoint else head(x, labels)
    torch.manual_seed(4)
    loss.backward()
    assert x.grad is not None and head.weight.grad is not None
    return Step(loss.detach(), x.grad, head.weight.grad)


def test_activation_checkpointing_replays_the_sampled_set() -> None:
    plain, replayed = (assemble(run_ranks(2, replayed_step, flag)) for flag in (False, True))
    assert torch.equal(plain.loss, replayed.loss)
    torch.testing.assert_close(
        (replayed.embeddings_grad, replayed.weight_grad), (plain.embeddings_grad, plain.weight_grad), rtol=0, atol=0
    )


def test_without_a_key_the_default_seed_rules_the_draw() -> None:
    head = torch_pfc.PartialFC(4, 100, sample_rate=0.2)
    sets = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        indices = [head.sample(torch.tensor([5]))[0] for _ in range(2)]
        sets.append([index.tolist() for index in indices if index is not None])
    one, two, again = sets
    assert one == again and one[0] != one[1] and one[0] != two[0]


def test_a_sparse_gradient_stays_coalesced_over_accumulation_and_copies() -> None:
    """Autograd drops the mark where it stores the first gradient."""
    original = torch_pfc.PartialFC(4, 50, sample_rate=0.2, sparse_grad=True)
    for head in (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        for labels in ([3, 4, 3], [7, 8, 49]):
            head(torch.randn(3, 4), torch.tensor(labels)).backward()
            assert head.weight.grad is not None
            assert head.weight.grad.is_sparse and head.weight.grad.is_coalesced()


def steps_with_keys(key: int) -> Step:
    return head_step(random_batch(4, 40, 3, scale=8.0, seed=6), [2, 2], sample_rate=0.3, key=key)


def test_a_given_key_repeats_the_step() -> None:
    first, again = (assemble(run_ranks(2, steps_with_keys, 5)) for _ in range(2))
    other = assemble(run_ranks(2, steps_with_keys, 6))
    assert torch.equal(first.weight_grad, again.weight_grad)
    assert first.loss != other.loss


def test_a_dropped_head_gives_its_weight_back_at_once() -> None:
    """Its gradient hooks do not hold it: gigabytes would wait for the garbage collector."""
    head = torch_pfc.PartialFC(4, 10, sample_rate=0.5, sparse_grad=True)
    head(torch.randn(2, 4), torch.tensor([1, 2])).backward()
    weight = weakref.ref(head.weight)
    del head
    assert weight() is None


def test_a_step_on_the_meta_device_has_shapes_alone() -> None:
    head = torch_pfc.PartialFC(4, 10, sample_rate=0.5, device="meta")
    embeddings = torch.empty(3, 4, device="meta", requires_grad=True)
    loss = head(embeddings, torch.empty(3, dtype=torch.int64, device="meta"))
    loss.backward()
    assert loss.shape == () and embeddings.grad is not None and head.weight.grad is not None
    assert head.weight.grad.shape == (10, 4) and head.weight.grad.is_meta
