"""Forwards and backwards that are not the usual one each."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dmuown.errors import OwnershipError
from dmuown.ownership import dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import Block, batch, build, loss_of
from tests.distributed.ownership.training import (
    TIGHT,
    assert_nothing_but_homes,
    compare,
    dedicated,
    mean_over_ranks,
    mesh_of,
    policy,
    whole_gradients,
)

Pair = namedtuple("Pair", "first rest")


@dataclass
class Output:
    """As Hugging Face's ModelOutput, without its mapping."""

    loss: Tensor | None
    hidden: tuple[Tensor, ...]
    note: str = "kept"


class Wrapped(nn.Module):
    """Blocks that take and return structures, by keyword too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structured() for _ in range(2))

    def forward(self, hidden: Tensor) -> Output:
        kept: list[Tensor] = []
        for layer in self.layers:
            result = layer(states={"hidden": hidden, "all": kept}, flag=True)
            assert type(result) is Output
            assert result.note == "kept"
            hidden = result.hidden[0]
        return Output(hidden.square().mean(), (hidden, *kept))


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, states: dict[str, Any], flag: bool) -> Output:
        assert flag
        hidden = self.block(states["hidden"], scale=torch.ones((), dtype=torch.float64))
        states["all"].append(hidden)
        return Output(None, (hidden, hidden.detach()))


class ModelOutput(dict[str, Any]):
    """A mapping with attributes, whose class code checks."""

    def __getattr__(self, key: str) -> Any:
        return self[key]


def _structures(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Wrapped().double(), Wrapped().double()
    plain.load_state_dict(model.state_dict())
    dedicated(model, mesh_of(world_size), param_policy=policy())
    hidden = torch.randn(3, 16, dtype=torch.float64)
    result, expected = model(hidden), plain(hidden)
    assert type(result) is Output
    for each in (result, expected):
        assert each.loss is not None
        each.loss.backward()
    compare(whole_gradients(model), {name: param.grad for name, param in plain.named_parameters()}, "gradient", TIGHT)
    assert_nothing_but_homes(model)


def test_nested_keyword_and_dataclass_values(ranks2: RankPool) -> None:
    ranks2.run(_structures, timeout=180)


class Returning(nn.Module):
    """A boundary that returns whatever it was made with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        self.made = {
            "mapping": ModelOutput(logits=y, cache=None),
            "tuple": (y, None, [y, {"deep": y}]),
            "named tuple": Pair(y, (y,)),
        }[self.kind]
        return self.made


def _objects(rank: int, world_size: int) -> None:
    for kind in ("mapping", "tuple", "named tuple"):
        model = nn.ModuleDict({"only": Returning(kind)})
        dedicated(model, mesh_of(world_size), param_policy={"defaults": {"route": "adamw"}})
        value = model["only"](torch.randn(2, 4))
        assert value is model["only"].made
        assert_nothing_but_homes(model)


def test_outputs_stay_the_objects_they_are(ranks2: RankPool) -> None:
    ranks2.run(_objects, timeout=180)


class Odd(nn.Module):
    """Blocks run twice, out of order, or not at all on one rank."""

    def __init__(self, plan: list[int]) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for index in self.plan:
            hidden = self.layers[index](hidden)
        return hidden


def _odd(rank: int, world_size: int, orders: list[list[int]], reshard: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Odd(orders[rank]).double()
    references = [Odd(order).double() for order in orders]
    for reference in references:
        reference.load_state_dict(model.state_dict())
    dedicated(model, mesh_of(world_size), param_policy=policy(), reshard_after_forward=reshard)
    for step in range(2):
        inputs = [torch.randn(5, 16, dtype=torch.float64, generator=_seeded(10 * step + each)) for each in range(2)]
        model(inputs[rank]).square().mean().backward()
        for reference, value in zip(references, inputs, strict=True):
            reference(value).square().mean().backward()
        assert_nothing_but_homes(model)
    expected: dict[str, Tensor | None] = {}
    for name, _ in references[0].named_parameters():
        grads = [reference.get_parameter(name).grad for reference in references]
        present = [grad for grad in grads if grad is not None]
        expected[name] = torch.stack(present).sum(0) / 2 if present else None
    compare(whole_gradients(model), expected, "gradient", TIGHT)
    return {kind: count for kind, (count, _) in runtime_of(model).link.counts.items()}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, 2], [0, 2]],
        [[1, 2], [0, 1, 2]],
        [[0, 1], [0]],
        [[0, 2], [0, 2]],
        [[0, 1, 1, 2], [0, 1, 1, 2]],
        [[0, 1, 2, 0], [0, 1, 2, 0]],
        [[2, 1, 0], [2, 1, 0]],
    ],
    ids=["middle skipped", "first skipped", "last skipped", "never run", "repeated", "repeated later", "reversed"],
)
def test_skipped_and_repeated_boundaries(ranks2: RankPool, orders: list[list[int]], reshard: bool) -> None:
    counts = ranks2.run(_odd, orders, reshard, timeout=180)
    assert counts[0] == counts[1]  # every rank took part in every collective


def _evaluation(rank: int, world_size: int, reshard: bool) -> None:
    model, plain = build().double(), build().double()
    dedicated(model, mesh_of(world_size), reshard_after_forward=reshard)
    tokens = batch(0, rank)
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(model(tokens), plain(tokens), **TIGHT)
            assert_nothing_but_homes(model)
            for length in (2, 3):  # as generation does, pass by pass
                torch.testing.assert_close(model(tokens[:, :length]), plain(tokens[:, :length]), **TIGHT)
            hidden = model.model(tokens)  # a submodule alone
            torch.testing.assert_close(model.lm_head(hidden), plain(tokens), **TIGHT)
            assert_nothing_but_homes(model)
    # A forward with gradients but without a backward leaves nothing behind, and stale values are never used.
    loss_of(model, tokens)
    with torch.no_grad():
        for record in dedicated_records(model).values():
            if record.owned:
                record.local_home().mul_(2)
        for param in plain.parameters():
            param.mul_(2)
    torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens), **TIGHT)
    with torch.no_grad():
        model(tokens)
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
def test_evaluation(ranks2: RankPool, reshard: bool) -> None:
    ranks2.run(_evaluation, reshard, timeout=180)


def _two_forwards(rank: int, world_size: int, reshard: bool) -> None:
    """A contrastive loss: two forwards, then one backward; and a second backward of a kept graph."""
    model, plain = build(layers=2).double(), build(layers=2).double()
    dedicated(model, mesh_of(world_size), reshard_after_forward=reshard)
    for step in range(2):
        first, second = batch(step, 7), batch(step, 8)
        for each in (model, plain):
            (loss_of(each, first) - 2 * loss_of(each, second)).backward()
        assert_nothing_but_homes(model)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    compare(whole_gradients(model), expected, "gradient", TIGHT)
    if reshard:
        for each in (model, plain):
            loss = loss_of(each, batch(5, 7))
            loss.backward(retain_graph=True)
            loss.backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        compare(whole_gradients(model), expected, "gradient", TIGHT)
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
def test_two_forwards_before_a_backward(ranks2: RankPool, reshard: bool) -> None:
    ranks2.run(_two_forwards, reshard, timeout=180)


class Direct(nn.Module):
    """Reads weights itself: its own, and a child's that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.float64) / 4)
        self.inner = nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(hidden, self.weight), self.inner.weight)


def _direct(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = nn.Sequential(Direct()), nn.Sequential(Direct())
    plain.load_state_dict(model.state_dict())
    dedicated(
        model,
        mesh_of(world_size),
        hook_boundary_predicate=lambda module: isinstance(module, Direct),
        param_policy=policy(),
    )
    hidden = torch.randn(3, 16, dtype=torch.float64)
    for each in (model, plain):
        each(hidden).square().mean().backward()
    compare(whole_gradients(model), {name: param.grad for name, param in plain.named_parameters()}, "gradient", TIGHT)
    assert_nothing_but_homes(model)
    # Outside its boundary a parameter that is elsewhere says so, instead of reading freed memory.
    for record in dedicated_records(model).values():
        if not record.owned:
            with pytest.raises(OwnershipError, match=rf"{record.name}: holds no data on this rank.*rank {1 - rank}"):
                record.home + 1
            with pytest.raises(OwnershipError, match="holds no data"):
                nn.init.normal_(record.home)


def test_direct_access_to_weights(ranks2: RankPool) -> None:
    ranks2.run(_direct, timeout=180)


class Failing(Block):
    def forward(self, hidden: Tensor, *, scale: Tensor | None = None) -> Tensor:
        if self.fails == "forward":
            raise ValueError("this rank leaves the step")
        output = super().forward(hidden, scale=scale)
        if self.fails == "backward":
            output.register_hook(_leave)
        return output

    fails = ""


def _leave(grad: Tensor) -> None:
    raise ValueError("this rank leaves the step")


def _set_failing(model: Odd, fails: str) -> None:
    block = model.layers[1]
    assert isinstance(block, Failing)
    block.fails = fails


def _leaving(rank: int, world_size: int, where: str) -> str:
    """Rank 0 raises in its second block's forward or backward; rank 1 must not hang past the group's timeout."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = Odd([0, 1, 2])
    for layer in model.layers:
        layer.__class__ = Failing
    dedicated(model, mesh, param_policy={"defaults": {"route": "adamw"}})
    model(torch.randn(2, 16)).sum().backward()
    assert_nothing_but_homes(model)
    _set_failing(model, where if rank == 0 else "")
    try:
        for _ in range(3):
            model(torch.randn(2, 16)).sum().backward()
    except ValueError as error:
        return str(error)
    except OwnershipError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_leaves_a_step_does_not_hang_the_others(where: str) -> None:
    with RankPool(2) as pool:
        first, second = pool.run(_leaving, where, timeout=60)
    assert first == "this rank leaves the step"
    assert second.startswith("boundary layers.")
    assert "another rank left the step" in second


def _recovering(rank: int, world_size: int) -> None:
    """An exception on every rank, caught by the training loop: the next step is as if it had not been."""
    model, plain = Odd([0, 1, 2]).double(), Odd([0, 1, 2]).double()
    plain.load_state_dict(model.state_dict())
    dedicated(model, mesh_of(world_size), param_policy=policy())
    for layer in model.layers:
        layer.__class__ = Failing
    hidden = torch.randn(2, 16, dtype=torch.float64)
    _set_failing(model, "forward")
    with pytest.raises(ValueError, match="leaves the step"):
        model(hidden)
    _set_failing(model, "")

    def refuse(grad: Tensor) -> None:
        raise RuntimeError("not this gradient")

    output = model(hidden)
    middle = output.grad_fn.next_functions[0][0]
    handle = middle.register_prehook(lambda grads: refuse(grads[0]))
    with pytest.raises(RuntimeError, match="not this gradient"):
        output.sum().backward()
    handle.remove()
    for each in (model, plain):
        each(hidden).square().mean().backward()
    compare(whole_gradients(model), {name: param.grad for name, param in plain.named_parameters()}, "gradient", TIGHT)
    assert_nothing_but_homes(model)


def test_recovery_from_an_exception_on_all_ranks(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    ranks2.run(_recovering, timeout=180)


def _absent(rank: int, world_size: int) -> None:
    """A parameter that no rank used has no gradient; one that another rank used has that rank's share."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    holder = nn.ModuleList([nn.ModuleDict({"used": model["a"], "unused": model["b"]})])
    root = Root(holder).double()
    plan = dedicated(root, mesh_of(world_size), param_policy=policy())
    hidden = torch.ones(2, 4, dtype=torch.float64)
    # Its owner is the one that does not use it, and learns from the reduction that another rank did.
    root(hidden, use=rank != plan.owners["layers.0.used.weight"]).sum().backward()
    grads = whole_gradients(root)
    assert grads["layers.0.unused.weight"] is None
    expected = torch.full((4, 4), 2.0, dtype=torch.float64) / world_size
    torch.testing.assert_close(grads["layers.0.used.weight"], expected)
    assert_nothing_but_homes(root)


class Root(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.layers[0].__class__ = Choosing

    def forward(self, hidden: Tensor, *, use: bool) -> Tensor:
        return self.layers[0](hidden.requires_grad_(), use)


class Choosing(nn.ModuleDict):
    def forward(self, hidden: Tensor, use: bool) -> Tensor:
        return self["used"](hidden) if use else hidden * 1


def test_absent_gradients(ranks2: RankPool) -> None:
    ranks2.run(_absent, timeout=180)


def _frozen(rank: int, world_size: int, reshard: bool) -> None:
    """LoRA-like: a frozen weight is needed in backward after the trained one has its gradient."""
    model, plain = build(layers=2).double(), build(layers=2).double()
    for each in (model, plain):
        for layer in each.model.layers:
            layer.get_parameter("down_proj.weight").requires_grad_(False)
            layer.get_parameter("norm.weight").requires_grad_(False)  # read last in the block's backward
        each.model.embed_tokens.weight.requires_grad_(False)
    dedicated(model, mesh_of(world_size), predicate=lambda name, param: True, reshard_after_forward=reshard)
    for step in range(2):
        if step == 1:  # frozen later, and one thawed
            for each in (model, plain):
                each.get_parameter("model.layers.0.gate_proj.weight").requires_grad_(False)
        loss_of(model, batch(step, rank)).backward()
        (torch.stack([loss_of(plain, batch(step, each)) for each in range(world_size)]).mean()).backward()
        assert_nothing_but_homes(model)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    compare(whole_gradients(model), expected, "gradient", TIGHT)


@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
def test_frozen_parameters(ranks2: RankPool, reshard: bool) -> None:
    ranks2.run(_frozen, reshard, timeout=180)


def _soak(rank: int, world_size: int) -> None:
    """Buffers in flight outlive allocator churn: after many steps every rank still sees the same parameters."""
    model = build(layers=2)
    dedicated(model, mesh_of(world_size), param_policy={**policy(), "defaults": {"route": "adamw"}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100):
        churn = [torch.randn(997 + 13 * step) for _ in range(5)]
        loss_of(model, batch(step, rank)).backward()
        del churn
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(batch(0, 0))
    torch.testing.assert_close(mean_over_ranks(logits), logits, rtol=0, atol=0)
    assert_nothing_but_homes(model)


def test_many_steps(ranks2: RankPool) -> None:
    ranks2.run(_soak, timeout=180)
