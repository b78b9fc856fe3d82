"""Parameters stay visible: names, state dicts, moves, ties, attributes; and models on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.errors import OwnershipError
from dmuown.ownership import dedicated_records, gathered, record_of, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import (
    TIGHT,
    assert_nothing_but_homes,
    compare,
    dedicated,
    mesh_of,
    policy,
    whole_gradients,
    whole_parameters,
)


def _names_and_attributes(rank: int, world_size: int) -> None:
    model, plain = build(tied=True), build(tied=True)
    before = dict(model.named_parameters())
    before["model.norm.weight"].tag = "kept"  # type: ignore[attr-defined]
    before["model.embed_tokens.weight"].tag = "kept too"  # type: ignore[attr-defined]
    plan = dedicated(model, mesh_of(world_size))
    after = dict(model.named_parameters())
    assert list(after) == [name for name, _ in plain.named_parameters()]
    for name, param in plain.named_parameters():
        found = after[name]
        assert isinstance(found, nn.Parameter)
        assert found.shape == param.shape
        assert found.numel() == param.numel()
        assert found.requires_grad
        assert found.is_leaf
        if not isinstance(found, DTensor):
            assert found is before[name]  # who holds it, holds it still
    assert sum(param.numel() for param in model.parameters()) == sum(param.numel() for param in plain.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert after["model.norm.weight"].tag == "kept"  # type: ignore[attr-defined]
    assert after["model.embed_tokens.weight"].tag == "kept too"  # type: ignore[attr-defined]
    record = record_of(after["model.embed_tokens.weight"])
    assert record is not None
    assert record.aliases == ("lm_head.weight",)
    assert plan.owners["model.embed_tokens.weight"] is None
    assert "lm_head.weight" not in plan.owners
    for name, each in dedicated_records(model).items():
        assert each.owned == (plan.owners[name] in (None, rank))
        assert repr(each.home)
    assert_nothing_but_homes(model)


def test_names_and_attributes(ranks2: RankPool) -> None:
    ranks2.run(_names_and_attributes, timeout=180)


def _state_dicts(rank: int, world_size: int) -> None:
    model, other = build(seed=0), build(seed=1)
    whole = {name: value.clone() for name, value in other.state_dict().items()}
    dedicated(model, mesh_of(world_size), param_policy={**policy(), "defaults": {"route": "muon"}})
    state = model.state_dict()
    assert list(state) == list(whole)
    for name, record in dedicated_records(model).items():
        value = state[name]
        assert tuple(value.shape) == record.shape
        assert (value.device.type == "meta") == (not record.owned)
    # A whole state dict, as a single process saved it, loads on every rank.
    assert model.load_state_dict(whole).missing_keys == []
    compare(whole_parameters(model), whole, "loaded")
    assert_nothing_but_homes(model)
    # A rank's own state dict loads back, with and without the entries that are elsewhere.
    own = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(own)
    compare(whole_parameters(model), {name: value * 2 for name, value in whole.items()}, "doubled")
    model.load_state_dict({name: value for name, value in own.items() if value.device.type != "meta"})
    # Mistakes are still mistakes, wherever the parameter is.
    for name in ("lm_head.weight", "model.layers.0.gate_proj.weight", "model.layers.0.up_proj.weight"):
        wrong = dict(whole)
        wrong[name] = torch.zeros(3, 3)
        with pytest.raises(RuntimeError, match=name):
            model.load_state_dict(wrong)
    missing = dict(whole)
    del missing["model.layers.0.up_proj.weight"]
    if dedicated_records(model)["model.layers.0.up_proj.weight"].owned:
        with pytest.raises(RuntimeError, match=r"model\.layers\.0\.up_proj\.weight"):
            model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match="another"):
        model.load_state_dict({**whole, "another": torch.zeros(1)})


def test_state_dicts(ranks2: RankPool) -> None:
    ranks2.run(_state_dicts, timeout=180)


def _moves(rank: int, world_size: int) -> None:
    model = build(tied=True)
    model.model.register_buffer("positions", torch.zeros(3))
    before = {name: param.clone() for name, param in model.named_parameters()}
    dedicated(model, mesh_of(world_size), param_policy={**policy(), "defaults": {"route": "muon"}})
    homes = {name: record.home for name, record in dedicated_records(model).items()}
    model.to("cpu")
    model.to(torch.float32)
    assert all(record.home is homes[name] for name, record in dedicated_records(model).items())
    compare(whole_parameters(model), before, "after to()")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(OwnershipError, match=r"has its dtype, torch\.float32, from the policy"):
            model.to(dtype)
    assert_nothing_but_homes(model)
    loss_of(model, batch(0, rank)).backward()
    model.zero_grad()
    model.requires_grad_(False)
    assert not any(param.requires_grad for param in model.parameters())
    assert not loss_of(model, batch(0, rank)).requires_grad
    model.requires_grad_(True)
    loss_of(model, batch(0, rank)).backward()
    assert all(grad is not None for grad in whole_gradients(model).values())


def test_moves(ranks2: RankPool) -> None:
    ranks2.run(_moves, timeout=180)


def _meta(rank: int, world_size: int, how: str) -> None:
    """Dedicated before it has values, then given some."""
    plain = build(seed=3)
    with torch.device("meta"):
        model = build()
    dedicated(model, mesh_of(world_size), param_policy={**policy(), "defaults": {"route": "muon"}})
    assert all(param.device.type == "meta" for param in model.parameters())
    model.to_empty(device="cpu")
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert_nothing_but_homes(model)
    if how == "loaded":
        model.load_state_dict(plain.state_dict())
    else:
        with gathered(model, writeback=True), torch.no_grad():
            for name, param in model.named_parameters():
                # Ranks disagree on purpose: the owner's values count.
                param.copy_(plain.get_parameter(name) + (0.0 if _owns(model, name, rank) else 5.0))
    expected = dict(plain.named_parameters())
    actual = whole_parameters(model)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value.detach(), rtol=0, atol=0)
    assert_nothing_but_homes(model)
    loss_of(model, batch(0, rank)).backward()
    assert all(grad is not None for grad in whole_gradients(model).values())
    assert_nothing_but_homes(model)


def _owns(model: nn.Module, name: str, rank: int) -> bool:
    owner = runtime_of(model).plan.owners[name]
    return owner is None or owner == rank


@pytest.mark.parametrize("how", ["loaded", "initialized"])
def test_dedicated_on_the_meta_device(ranks2: RankPool, how: str) -> None:
    ranks2.run(_meta, how, timeout=180)


def _still_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = build()
    dedicated(model, mesh_of(world_size))
    with pytest.raises(OwnershipError, match="still on the meta device"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_a_forward_on_the_meta_device_is_refused(ranks2: RankPool) -> None:
    ranks2.run(_still_meta, timeout=180)


class Probe(nn.Module):
    """Notes the dtypes of what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.seen = {"weight": self.linear.weight.dtype, "input": x.dtype, "ids": None if ids is None else ids.dtype}
        return self.linear(x.to(self.linear.weight.dtype)), ids


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Probe()
        self.action_head = Probe()

    def forward(self, x: Tensor) -> Tensor:
        y, ids = self.body(x, torch.arange(3))
        assert ids is not None
        self.between = y.dtype
        result: Tensor = self.action_head(y, ids=ids)[0]
        return result


def _precision(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Two(), Two()
    plain.load_state_dict(model.state_dict())
    fp32 = {"param_dtype": "fp32", "grad_dtype": "fp32", "output_dtype": "fp32", "cast_forward_inputs": True}
    dedicated(
        model,
        mesh_of(world_size),
        hook_boundary_predicate=lambda module: isinstance(module, Probe),
        param_policy={
            "defaults": {"route": "adamw", "param_dtype": "bf16", "cast_forward_inputs": True},
            "overrides": [
                {"name": "body", "set": {"grad_dtype": "float32"}},
                {"name": "action_head", "set": fp32},
            ],
        },
    )
    model(torch.randn(2, 4)).square().mean().backward()
    assert model.body.seen == {"weight": torch.bfloat16, "input": torch.bfloat16, "ids": torch.int64}
    assert model.between == torch.bfloat16
    assert model.action_head.seen == {"weight": torch.float32, "input": torch.float32, "ids": torch.int64}
    for name, record in dedicated_records(model).items():
        assert record.home.dtype == torch.float32, name
        assert record.grad_dtype == torch.float32, name
        if record.owned:
            assert record.home.grad is not None
            assert record.home.grad.dtype == torch.float32
    by_dtype = {transfer.param_dtype: transfer.grad_dtype for transfer in runtime_of(model).plan.transfers}
    assert by_dtype == {torch.bfloat16: torch.float32, torch.float32: torch.float32}
    # fp32 masters take steps that bf16 could not hold.
    with torch.no_grad():
        for record in dedicated_records(model).values():
            if record.owned:
                record.local_home().fill_(1.0).add_(1e-4)
    for value in whole_parameters(model).values():
        torch.testing.assert_close(value, torch.full_like(value, 1.0001), rtol=0, atol=1e-7)
    assert_nothing_but_homes(model)


def test_precision_by_field(ranks2: RankPool) -> None:
    ranks2.run(_precision, timeout=180)


def _bf16_gradients(rank: int, world_size: int) -> None:
    """`grad_dtype` is the dtype of the sum: bf16 loses what fp32 keeps."""
    for grad_dtype, expected in (("float32", 1.0 + 2.0**-9), ("bfloat16", 1.0)):
        model = nn.ModuleDict({"only": nn.Linear(1, 1, bias=False)})
        dedicated(
            model,
            mesh_of(world_size),
            param_policy={"defaults": {"route": "adamw", "param_dtype": "float32", "grad_dtype": grad_dtype}},
        )
        (model["only"](torch.tensor([[2.0 if rank == 0 else 2.0**-8]]))).sum().backward()
        grad = whole_gradients(model)["only.weight"]
        assert grad is not None
        assert grad.item() == expected, grad_dtype
        assert_nothing_but_homes(model)


def test_gradient_dtype(ranks2: RankPool) -> None:
    ranks2.run(_bf16_gradients, timeout=180)


def _tied_across_blocks(rank: int, world_size: int) -> None:
    model, plain = build(layers=3).double(), build(layers=3).double()
    for each in (model, plain):
        shared = each.model.layers[0].get_parameter("gate_proj.weight")
        each.model.layers[2].get_submodule("gate_proj").weight = shared
    dedicated(model, mesh_of(world_size))
    record = dedicated_records(model)["model.layers.0.gate_proj.weight"]
    assert record.aliases == ("model.layers.2.gate_proj.weight",)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        torch.stack([loss_of(plain, batch(step, each)) for each in range(world_size)]).mean().backward()
        assert_nothing_but_homes(model)
    compare(whole_gradients(model), {name: param.grad for name, param in plain.named_parameters()}, "gradient", TIGHT)


def test_weights_tied_across_boundaries(ranks2: RankPool) -> None:
    ranks2.run(_tied_across_blocks, timeout=180)
