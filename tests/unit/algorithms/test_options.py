"""Options by any of their names, adapters, compilation and determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import dmuown
from dmuown.errors import OptionError, OptionTypeError
from tests.unit.algorithms.oracles import initial

ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 3) -> Tensor:
    for step in range(steps):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(10 * index + step)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params])


def fresh() -> list[nn.Parameter]:
    return [nn.Parameter(initial(6, 8, dtype=torch.float32, seed=i)) for i in range(2)]


@pytest.mark.parametrize(
    "alias, canonical",
    [
        ({"wd": 0.3}, {"weight_decay": 0.3}),
        ({"wd": 0.3, "use_cautious_wd": True}, {"weight_decay": 0.3, "cautious_wd": True}),
        ({"momentum": 0.7}, {"mu": 0.7}),
        ({"orthogonalization_strategy": "newton_schulz"}, {"scheme": "newton_schulz"}),
    ],
)
@pytest.mark.parametrize("where", ["argument", "group"])
def test_aliases(alias: dict[str, Any], canonical: dict[str, Any], where: str) -> None:
    """As arguments and as group keys; each changes the result, as its canonical name does."""
    results = []
    for options in (alias, canonical, {}):
        params = fresh()
        group, arguments = ({}, options) if where == "argument" else (options, {})
        results.append(run(params, dmuown.Muon([{"params": params, **group}], lr=0.05, **arguments)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("where", ["argument", "group"])
def test_adam_aliases(where: str) -> None:
    results = []
    spellings: list[dict[str, Any]] = [
        {"adam_betas": (0.5, 0.6), "wd": 0.2},
        {"betas": (0.5, 0.6), "weight_decay": 0.2},
        {},
    ]
    for options in spellings:
        params = fresh()
        group, arguments = (dict[str, Any](), options) if where == "argument" else (options, dict[str, Any]())
        optimizer = dmuown.Muon([{"params": params, "algorithm": "adamw", **group}], lr=0.05, **arguments)
        results.append(run(params, optimizer))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_is_adamw() -> None:
    spellings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"is_adamw": False}, {}),
        ({}, {"is_adamw": False}),
        ({}, {"algorithm": "adam"}),
    ]
    for arguments, group in spellings:
        params = fresh()
        optimizer = dmuown.Muon([{"params": params, "algorithm": "adamw", **group}], lr=0.05, wd=0.2, **arguments)
        theirs = fresh()
        expected = run(theirs, torch.optim.Adam(theirs, lr=0.05, betas=(0.9, 0.95), weight_decay=0.2, fused=True))
        assert optimizer.param_groups[0]["algorithm"] == "adam"
        assert torch.equal(run(params, optimizer), expected)


@pytest.mark.parametrize("options", [{"fused_adam": False}, {"foreach_adam": True}, {"foreach_adam": False}], ids=str)
def test_other_kernels_of_adam(options: dict[str, Any]) -> None:
    """Bit-equal to torch's same kernel."""
    params, theirs = fresh(), fresh()
    optimizer = dmuown.Muon([{"params": params, "algorithm": "adamw", **options}], lr=0.05, wd=0.2)
    foreach = options.get("foreach_adam")
    torchs = torch.optim.AdamW(theirs, lr=0.05, betas=(0.9, 0.95), weight_decay=0.2, foreach=foreach, fused=False)
    assert torch.equal(run(params, optimizer), run(theirs, torchs))


def test_contradictions_are_refused() -> None:
    with pytest.raises(OptionError, match="wd: disagrees with weight_decay, its alias"):
        dmuown.Muon(fresh(), wd=0.1, weight_decay=0.2)
    with pytest.raises(OptionError, match="fused_adam: excludes foreach_adam"):
        dmuown.Muon([{"params": fresh(), "algorithm": "adamw"}], fused_adam=True, foreach_adam=True)
    with pytest.raises(OptionError, match="amsgrad: is not supported"):
        dmuown.Muon([{"params": fresh(), "algorithm": "adamw", "amsgrad": True}])
    with pytest.raises(OptionError, match="amsgrad: is not supported, got True"):
        dmuown.Muon(fresh(), amsgrad=True)
    with pytest.raises(OptionError, match="orthogonalization_strategy: disagrees with scheme, its alias"):
        dmuown.Muon(fresh(), scheme="newton_schulz", orthogonalization_strategy="gram")
    with pytest.raises(OptionTypeError, match="use_polar_express: must be True or False, got 'no'"):
        dmuown.Muon(fresh(), use_polar_express="no")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is_adamw: must be True or False, got 'yes'"):
        dmuown.Muon([{"params": fresh(), "algorithm": "adamw", "is_adamw": "yes"}])
    with pytest.raises(OptionError, match="foreach: must be True, False or None, got 'no'"):
        dmuown.Muon(fresh(), foreach="no")


# --------------------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """A frozen linear layer and a LoRA adapter whose B is zero."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(12, 10, bias=False).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, 12) / 12**0.5)
        self.lora_b = nn.Parameter(torch.zeros(10, rank))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T
        return result


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_zero_initialised_adapter_learns(name: str, rank: int) -> None:
    torch.manual_seed(0)
    model, x = Adapted(rank), torch.randn(64, 12)
    goal = model.base(x) + x @ torch.randn(12, rank) @ torch.randn(rank, 10) / 12**0.5
    optimizer = dmuown.Muon(
        [{"params": list(model.named_parameters()), "algorithm": name}], lr=0.02, weight_decay=0.0, ns_dtype="float32"
    )
    losses = []
    for _ in range(80):
        loss = (model(x) - goal.detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert min(losses) < (0.5 if rank == 4 else 0.95) * losses[0]
    assert losses[1] != losses[0], "B moves from the first step on"
    assert (model.lora_b != 0).all()


def test_unfrozen_parameters_join_later() -> None:
    model = Adapted(2)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = dmuown.Muown(trainable, lr=0.02)
    before = model.base.weight.detach().clone()
    model.base.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.base.weight]})
    model(torch.randn(4, 12)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.base.weight, before)
    assert optimizer.orthogonalized == 3


# --------------------------------------------------------------------------------- compilation, determinism


@pytest.mark.parametrize("name", ALGORITHMS)
def test_deterministic_mode(name: str) -> None:
    """Allowed throughout the step, and repeated runs agree to the bit."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            params = fresh()
            group = {"params": params, "algorithm": name, "split_sizes": (4, 2), "weight_decay": 0.0}
            results.append(run(params, dmuown.Muon([group], lr=0.05)))
        assert torch.equal(*results)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_inside_a_compiled_function_equals_an_eager_one(name: str) -> None:
    """fullgraph=False: only the caller's own code is compiled, once, however many shapes the step works on."""
    shapes = [(4 + i, 6) for i in range(12)]
    results, graphs = [], CompileCounter()
    for compiled in (False, True):
        params = [nn.Parameter(initial(*shape, dtype=torch.float32)) for shape in shapes]
        optimizer = dmuown.Muown([{"params": params, "algorithm": name}], lr=0.02)
        scale = torch.tensor(1.0)

        def train(scale: Tensor, optimizer: Any = optimizer) -> Tensor:
            doubled = scale * 2
            optimizer.step()
            return doubled + 1

        torch._dynamo.reset()
        function = torch.compile(train, backend=graphs, fullgraph=False) if compiled else train
        with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
            for step in range(4):
                for index, param in enumerate(params):
                    generator = torch.Generator().manual_seed(10 * index + step)
                    param.grad = torch.randn(param.shape, generator=generator)
                assert function(scale) == 3
        results.append(torch.cat([param.detach().flatten() for param in params]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert graphs.frame_count == 2  # before the step, and after it


def test_fullgraph_through_the_step_is_refused() -> None:
    param = nn.Parameter(initial(4, 6, dtype=torch.float32))
    optimizer = dmuown.Muown([param], lr=0.02)
    param.grad = torch.ones_like(param)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dmuown's step is no single graph"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


def test_differentiating_the_update_is_refused() -> None:
    with pytest.raises(OptionError, match="differentiable"):
        dmuown.Muown([{"params": fresh(), "differentiable": True}])
