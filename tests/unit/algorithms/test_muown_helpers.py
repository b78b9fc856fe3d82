"""The helpers that AutoModel's Muown documents: their contracts, against autograd and on sharded DTensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dmuown.algorithms.muown import (
    _DION_MUON_HOOKS,
    _matrix_sharding,
    _newton_schulz,
    _nonzero_magnitude,
    _prepare_direction,
    _recompose,
    _row_norm,
    _row_sum,
)
from tests.distributed.harness import RankPool


def _case(axis: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W = g v / ||v|| of [2, 5, 4] with negative magnitudes, in fp64: weight, magnitude, direction, gradient."""
    direction, gradient = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    magnitude = torch.randn(2, 5, 1, dtype=torch.float64)
    weight = magnitude * direction / direction.norm(dim=-1, keepdim=True)
    tensors = (weight, magnitude, direction, gradient)
    if axis == -1:
        return tensors
    weight, magnitude, direction, gradient = (tensor.mT.contiguous() for tensor in tensors)
    return weight, magnitude, direction, gradient


@pytest.mark.parametrize("axis", [-1, -2])
def test_prepare_direction_is_the_chain_rule(axis: int) -> None:
    weight, magnitude, direction, gradient = _case(axis)
    norm = direction.norm(dim=axis, keepdim=True)
    g, v = magnitude.clone().requires_grad_(), direction.clone().requires_grad_()
    (g * v / v.norm(dim=axis, keepdim=True)).backward(gradient)
    found, magnitude_gradient, direction_gradient = _prepare_direction(weight, magnitude, norm, gradient, axis)
    torch.testing.assert_close(found, direction)
    torch.testing.assert_close(magnitude_gradient, g.grad)
    torch.testing.assert_close(direction_gradient, v.grad)


@pytest.mark.parametrize("axis", [-1, -2])
def test_recompose_writes_the_weight_and_returns_norms(axis: int) -> None:
    weight, magnitude, direction, _ = _case(axis)
    written = torch.full_like(weight, torch.nan)
    norms = _recompose(written, magnitude, direction, axis)
    torch.testing.assert_close(written, weight)
    torch.testing.assert_close(norms, direction.norm(dim=axis, keepdim=True))
    torch.testing.assert_close(_row_norm(direction, axis, 1e-8), norms, rtol=1e-6, atol=0)  # summed in fp32
    zero = torch.zeros_like(direction)
    assert torch.equal(_recompose(written, magnitude, zero, axis), torch.zeros_like(norms))
    assert torch.equal(written, zero)


def test_norms_have_a_floor_and_magnitudes_keep_their_sign() -> None:
    assert torch.equal(_row_norm(torch.zeros(2, 3), -1, 1e-3), torch.full((2, 1), 1e-3))
    assert _row_norm(torch.ones(2, 3, dtype=torch.bfloat16), -1, 1e-3).dtype == torch.bfloat16
    value = torch.tensor([2.0, 1e-9, 0.0, -0.0, -1e-9, -2.0])
    guarded = _nonzero_magnitude(value, 1e-3)
    assert guarded.tolist() == torch.tensor([2.0, 1e-3, 1e-3, 1e-3, -1e-3, -2.0]).tolist()
    assert guarded.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("epsilon", [1e-7, torch.tensor(1e-7)])
def test_newton_schulz_keeps_shape_and_axis_order(epsilon: float | Tensor) -> None:
    update = torch.randn(3, 6, 4)
    result = _newton_schulz(update, epsilon, False, 5)
    assert (result.shape, result.dtype, result.is_contiguous()) == (update.shape, torch.bfloat16, True)
    singular = torch.linalg.svdvals(result.float())
    assert float(singular.min()) > 0.6
    assert float(singular.max()) < 1.3
    turned = _newton_schulz(update.mT.contiguous(), epsilon, True, 5)
    assert turned.is_contiguous()
    assert torch.equal(turned, result.mT)


def test_the_hooks_are_those_of_the_locked_revision() -> None:
    assert _DION_MUON_HOOKS == ("_create_muon_tasks", "_create_adamw_tasks", "_get_or_initialize_state")


def _sharded(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    group = mesh.get_group()
    whole = torch.arange(24.0).view(2, 4, 3).sin()
    assert _matrix_sharding(whole) == (None, None)
    for placement, axis in ((Shard(1), 1), (Shard(-2), 1), (Shard(0), None), (Replicate(), None)):
        found = _matrix_sharding(distribute_tensor(whole, mesh, [placement]))
        assert found == (axis, None if axis is None else group)
    even = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    assert _matrix_sharding(even) == (1, group)
    with pytest.raises(ValueError, match="does not divide"):
        _matrix_sharding(distribute_tensor(whole, mesh, [Shard(2)]))
    with pytest.raises(ValueError, match="Partial"):
        _matrix_sharding(DTensor.from_local(whole, mesh, [Partial()]))
    square = init_device_mesh("cpu", (1, world_size))
    assert _matrix_sharding(distribute_tensor(torch.ones(4, 6), square, [Shard(0), Shard(1)]))[0] == 1
    value = torch.arange(24.0).view(4, 6).cos()
    for placement in (Shard(0), Shard(1)):
        total = _row_sum(distribute_tensor(value, mesh, [placement]), -1)
        assert isinstance(total, DTensor)
        assert not any(placement.is_partial() for placement in total.placements)
        torch.testing.assert_close(total.full_tensor(), value.sum(-1, keepdim=True))
        norm = _row_norm(distribute_tensor(value, mesh, [placement]), -1, 1e-8)
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(norm.full_tensor(), value.norm(dim=-1, keepdim=True))
    dist.barrier()


def test_sharded_tensors(ranks2: RankPool) -> None:
    ranks2.run(_sharded)
