"""`master_dtype` is what is stored, `optim_dtype` what the optimizer keeps: each as the policy says, on every route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dmuown
from dmuown.errors import OwnershipError
from dmuown.ownership import dedicated_records
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import POLICY, batch, build, loss_of
from tests.distributed.ownership.training import (
    OPTIONS,
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    dedicated,
    mesh_of,
    newton_schulz,
)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _precision(rank: int, world_size: int, master: str, optim: str, grad: str) -> None:
    model = build(layers=2)
    defaults = {
        "route": "muon",
        "param_dtype": "float32",
        "grad_dtype": grad,
        "master_dtype": master,
        "optim_dtype": optim,
    }
    dedicated(model, mesh_of(world_size), param_policy={**POLICY, "defaults": defaults})
    optimizer = dmuown.Muon(model, newton_schulz_func=newton_schulz, **OPTIONS)
    records = {name: record for name, record in dedicated_records(model).items() if record.owned}
    stored, wanted = getattr(torch, master), getattr(torch, optim)
    wide = torch.promote_types(stored, wanted)
    # The same algorithm on plain parameters of the wider dtype, rounded to the stored one after every step.
    copies = {name: nn.Parameter(_local(record.home).detach().to(wide)) for name, record in records.items()}
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [
        {
            "params": [copies[names[id(param)]] for param in group["params"] if names[id(param)] in copies],
            "algorithm": group["algorithm"],
            "optim_dtype": optim if wide != wanted else None,
        }
        for group in optimizer.param_groups
    ]
    reference = dmuown.Muon([group for group in groups if group["params"]], newton_schulz_func=newton_schulz, **OPTIONS)
    for step in range(3):
        loss_of(model, batch(step, rank)).backward()
        assert_nothing_but_homes(model)
        for name, record in records.items():
            assert record.home.dtype == stored, name
            assert record.home.grad is not None
            # A gradient that was reduced wider than the master is stored reaches a wider optimizer unrounded.
            assert record.home.grad.dtype == (
                torch.promote_types(stored, getattr(torch, grad)) if wide != stored else stored
            )
            copies[name].grad = _local(record.home.grad).to(wide)
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()
        for name, record in records.items():
            with torch.no_grad():
                copies[name].copy_(copies[name].to(stored))
            torch.testing.assert_close(
                _local(record.home).detach(), copies[name].detach().to(stored), rtol=0, atol=0, msg=name
            )
    for name, record in records.items():
        shaped = [value for value in optimizer.state[record.home].values() if value.shape == record.home.shape]
        assert shaped, name
        assert {value.dtype for value in shaped} == {wanted}, name
    assert_state_of_owned_only(model, optimizer)
    rows = dmuown.summarize_param_groups(model, optimizer)
    assert {(row.master_dtype, row.optim_dtype) for row in rows.parameters} == {(master, optim)}
    assert not rows.warnings
    assert {row.route for row in rows.parameters} == {"muon", "adamw", "sharded_adamw"}


@pytest.mark.parametrize(
    "master, optim, grad",
    [
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float64", "float32"),
        ("float64", "float32", "float32"),
        ("bfloat16", "float16", "float32"),
        ("float32", "float32", "bfloat16"),
    ],
)
def test_storage_and_update_on_every_route(ranks2: RankPool, master: str, optim: str, grad: str) -> None:
    ranks2.run(_precision, master, optim, grad, timeout=180)


def _some(rank: int, world_size: int) -> None:
    """Parameters of one group may differ: it is split, its options kept, and alike on every rank."""
    model = build(layers=1)
    policy: dict[str, Any] = {
        "defaults": {"route": "adamw", "master_dtype": "bfloat16"},
        "overrides": [{"name": "norm", "set": {"master_dtype": "float32"}}],
    }
    dedicated(model, mesh_of(world_size), param_policy=policy)
    params = list(model.parameters())
    optimizer = dmuown.Muon([{"params": params, "algorithm": "adamw", "weight_decay": 0.25}])
    assert [(group["optim_dtype"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ("float32", 0.25),
        (None, 0.25),
    ]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(params)
    # A group's own word is deliberate.
    optimizer = dmuown.Muon([{"params": params, "algorithm": "adamw", "optim_dtype": "bfloat16"}])
    for state in optimizer.state.values():
        assert {value.dtype for key, value in state.items() if key != "step"} <= {torch.bfloat16}
    # What torch's own optimizers would do otherwise is said.
    summary = dmuown.summarize_param_groups(model, torch.optim.AdamW(model.parameters()))
    assert any("have another optim_dtype in the policy" in warning for warning in summary.warnings)
    # Joining later, a group must say it.
    late = dmuown.Muon(
        [
            {
                "params": [param for name, param in model.named_parameters() if "lm_head" not in name],
                "algorithm": "adamw",
            }
        ],
        partial=True,
    )
    head = dict(model.named_parameters())["lm_head.weight"]
    record = dedicated_records(model)["lm_head.weight"]
    if record.owned:
        with pytest.raises(OwnershipError, match=r"lm_head\.weight: has optim_dtype torch\.float32 by its policy"):
            late.add_param_group({"params": [head], "algorithm": "adamw"})
    late.add_param_group({"params": [head], "algorithm": "adamw", "optim_dtype": "float32"})
    assert_nothing_but_homes(model)


def test_groups_of_several_dtypes(ranks2: RankPool) -> None:
    ranks2.run(_some, timeout=180)


def _own_dtype(rank: int, world_size: int, wanted: str | None) -> None:
    """Norms are stored in bf16 with fp32 state by their policy; an argument of the optimizer holds for all alike."""
    model = build(layers=1)
    rules = [*POLICY["overrides"], {"name": "norm", "set": {"master_dtype": "bfloat16", "optim_dtype": "float32"}}]
    dedicated(model, mesh_of(world_size), param_policy={**POLICY, "overrides": rules})
    optimizer = dmuown.Muown(model, optim_dtype=wanted)
    groups = [param for group in optimizer.param_groups for param in group["params"]]
    names = {id(param): name for name, param in model.named_parameters()}
    expected = torch.float32 if wanted is None else getattr(torch, wanted)
    checked = 0
    for param in groups:
        if param in optimizer.state and "momentum" in optimizer.state[param]:
            assert _local(optimizer.state[param]["momentum"]).dtype == expected, names[id(param)]
            checked += 1
    assert checked
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("wanted", [None, "bfloat16"])
def test_an_optimizers_own_optim_dtype_holds_for_all_its_parameters(ranks2: RankPool, wanted: str | None) -> None:
    ranks2.run(_own_dtype, wanted)


def _reset(rank: int, world_size: int, all_of_it: bool) -> None:
    model = build(layers=1)
    dedicated(model, mesh_of(world_size))
    optimizer = dmuown.Muown(model, capturable=True)
    loss_of(model, batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    chosen = [param for name, param in model.named_parameters() if all_of_it or "q_proj" in name]
    optimizer.reset_state(None if all_of_it else chosen)
    owned = {id(param) for param in chosen}
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], Tensor) or not any(param in optimizer.state for param in group["params"])
        for param in group["params"]:
            if "momentum" in optimizer.state.get(param, {}):
                assert bool(_local(optimizer.state[param]["momentum"]).any()) is (id(param) not in owned)
    loss_of(model, batch(1, rank)).backward()
    optimizer.step()
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("all_of_it", [False, True])
def test_owners_reset_what_they_own_and_the_others_nothing(ranks2: RankPool, all_of_it: bool) -> None:
    """The same call on every rank: it was refused where a parameter is away, and the owner went on alone."""
    ranks2.run(_reset, all_of_it)
