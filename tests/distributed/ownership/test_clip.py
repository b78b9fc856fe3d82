"""The global gradient norm, against torch's own on the gathered gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuown.errors import GradientError, OptionError, OwnershipError
from dmuown.ownership import clip_grad_norm_
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import (
    TIGHT,
    assert_nothing_but_homes,
    compare,
    dedicated,
    matrices_in_layers,
    mesh_of,
    policy,
    shard_rest,
    whole_gradients,
)


def _clip(rank: int, world_size: int, rest: str, replicate: int) -> None:
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for max_norm in (0.01, 1e9, math.inf):
            model, plain = build(tied=not rest).double(), build(tied=not rest).double()
            mesh = mesh_of(world_size, replicate=replicate)
            if rest:
                defaults = {"defaults": policy()["defaults"]}
                dedicated(model, mesh, predicate=matrices_in_layers, param_policy=defaults)
            else:
                dedicated(model, mesh)
            caller: nn.Module = model
            if rest == "fsdp2":
                shard_rest(model, mesh)
            elif rest == "ddp":
                caller = DistributedDataParallel(model)
            loss_of(caller, batch(0, rank)).backward()
            torch.stack([loss_of(plain, batch(0, each)) for each in range(world_size)]).mean().backward()
            norm = clip_grad_norm_(caller, max_norm, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            torch.testing.assert_close(norm, expected.float(), rtol=1e-6, atol=0)
            clipped = {name: param.grad for name, param in plain.named_parameters()}
            tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-9} if max_norm == 0.01 else TIGHT
            compare(whole_gradients(model), clipped, "clipped gradient", tolerance)
            assert_nothing_but_homes(model)


@pytest.mark.parametrize("rest", ["", "fsdp2", "ddp"])
def test_equals_torch_on_two_ranks(ranks2: RankPool, rest: str) -> None:
    ranks2.run(_clip, rest, 1, timeout=180)


@pytest.mark.parametrize("rest", ["", "fsdp2"])
def test_equals_torch_under_hsdp(ranks4: RankPool, rest: str) -> None:
    ranks4.run(_clip, rest, 2, timeout=180)


def _nonfinite(rank: int, world_size: int, norm_type: Any, value: float, route: str) -> None:
    """One element that is not finite, on one rank: norm and gradients are torch's on every rank."""
    model, plain = build(layers=2), build(layers=2)
    dedicated(model, mesh_of(world_size), param_policy={**policy(), "defaults": {"route": "muon"}})
    loss_of(model, batch(0, rank)).backward()
    torch.stack([loss_of(plain, batch(0, each)) for each in range(world_size)]).mean().backward()
    name = {"owner": "model.layers.0.gate_proj.weight", "shards": "lm_head.weight"}[route]
    grad, whole = model.get_parameter(name).grad, plain.get_parameter(name).grad
    assert whole is not None
    with torch.no_grad():
        whole[-1, -1] = value
        if isinstance(grad, DTensor):
            if rank == world_size - 1:
                grad.to_local()[-1, -1] = value
        elif grad is not None:
            grad[-1, -1] = value
    norm = clip_grad_norm_(model, 1.0, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
    torch.testing.assert_close(norm, expected.float(), rtol=1e-5, atol=0, equal_nan=True)
    clipped = whole_gradients(model)
    for each, param in plain.named_parameters():
        torch.testing.assert_close(clipped[each], param.grad, rtol=1e-4, atol=1e-7, equal_nan=True, msg=each)
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("route", ["owner", "shards"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("norm_type", [2.0, 1, 0.5, math.inf, "inf"])
def test_not_finite(ranks2: RankPool, norm_type: Any, value: float, route: str) -> None:
    ranks2.run(_nonfinite, norm_type, value, route, timeout=60)


def _refused(rank: int, world_size: int) -> None:
    with pytest.raises(OwnershipError, match="has no dedicated parameters"):
        clip_grad_norm_(build(), 1.0)
    model = build()
    dedicated(model, mesh_of(world_size))
    loss_of(model, batch(0, rank)).backward()
    for order in (0, "two", None):
        with pytest.raises(OptionError, match="norm_type: must be positive or infinity"):
            clip_grad_norm_(model, 1.0, order)  # type: ignore[arg-type]
    for bad in (-1.0, math.nan):
        with pytest.raises(OptionError, match="max_norm: must be 0 or more"):
            clip_grad_norm_(model, bad)
        with pytest.raises(OptionError, match="norm_type: must be positive"):
            clip_grad_norm_(model, 1.0, bad)
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None and rank == 0:
                param.grad.mul_(math.inf)
                break
    # One rank's overflow is every rank's error.
    with pytest.raises(GradientError, match=r"norm is (inf|nan)"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(clip_grad_norm_(model, math.inf))
    assert_nothing_but_homes(model)


def test_bad_input(ranks2: RankPool) -> None:
    ranks2.run(_refused, timeout=180)
