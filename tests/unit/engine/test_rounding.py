"""`stochastic_rounding=True`: which step, parameter and seed an optimizer draws for. Ranks: tests/distributed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.state.rounding import Rounding, hashed, word_of, words_of_positions
from tests.unit.algorithms import variants as variants
from tests.unit.algorithms.oracles import initial

ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown", "my_variant", "adamw", "adam", "lion")


def make(
    algorithm: str = "lion", *, count: int = 2, names: Sequence[str] | None = None, **options: Any
) -> tuple[list[Any], Any]:
    """Parameters of the same weights: what is rounded unlike then differs by its random numbers alone."""
    weight = initial(16, 24, dtype=torch.bfloat16)
    params = [torch.nn.Parameter(weight.clone()) for _ in range(count)]
    named = list(zip(names, params, strict=True)) if names is not None else params
    group = {"params": named, "algorithm": algorithm, "stochastic_rounding": True, **options}
    if algorithm not in ("adamw", "adam", "lion"):
        group.setdefault("ns_dtype", "float32")
    return params, dmuown.Muown([group], lr=2**-8, weight_decay=0.0)


def train(params: list[Any], optimizer: Any, steps: range) -> None:
    for step in steps:
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(param.dtype)
        optimizer.step()


def equal(ones: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_repeats_one_that_went_on(algorithm: str) -> None:
    """Invariant 4, without torch's random state: to the bit, through a file read with weights_only=True."""
    params, optimizer = make(algorithm)
    train(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [param.detach() for param in params]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(12345)
    others, resumed = make(algorithm)
    with torch.no_grad():
        for other, weight in zip(others, saved["params"], strict=True):
            other.copy_(weight)
    resumed.load_state_dict(saved["optimizer"])
    train(params, optimizer, range(3, 6))
    torch.rand(7)
    train(others, resumed, range(3, 6))
    assert equal(params, others)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("capturable", [False, True])
def test_copies_go_on_alike(duplicate: Any, capturable: bool) -> None:
    params, optimizer = make(capturable=capturable)
    train(params, optimizer, range(3))
    twin = duplicate(optimizer)
    train(params, optimizer, range(3, 5))
    train(twin.param_groups[0]["params"], twin, range(3, 5))
    assert equal(params, twin.param_groups[0]["params"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_neither_reads_nor_advances_the_generator(algorithm: str) -> None:
    results = []
    for seed in (1, 2):
        params, optimizer = make(algorithm)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        train(params, optimizer, range(2))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(params)
    assert equal(*results)


def test_the_numbers_are_those_written_down() -> None:
    """Runs go on under later versions: `tests/unit/state/test_rounding.py` pins what a name, step and seed draw."""
    params, optimizer = make(names="ab", rounding_seed=5)
    for step in range(3):
        expected = []
        for name, param in zip("ab", params, strict=True):
            param.grad = torch.where(param > 0, -1.0, 1.0).bfloat16()  # the same sign at every step: |w| grows by lr
            key = hashed(torch.tensor(step, dtype=torch.int32) ^ word_of("seed 5"))
            words = words_of_positions(name, [torch.arange(size) for size in param.shape])
            expected.append(Rounding(words, key)(param.detach().float() - 2**-8 * param.grad.float()))
        optimizer.step()
        assert equal(params, expected)


def rounded_up(before: Tensor, after: Tensor) -> Tensor:
    return (after.detach() != before).double()


def test_parameters_steps_groups_and_seeds_draw_apart() -> None:
    """From the same weights by the same small steps: about an eighth moves each time, and never the same eighth."""
    patterns = []
    for options in ({}, {"rounding_seed": 1}, {"step": 7}, {"names": "ab"}):
        params, optimizer = make(**options)
        optimizer.param_groups[0]["lr"] = 2**-10
        start = torch.ones_like(params[0])
        for _ in range(2):
            with torch.no_grad():
                for param in params:
                    param.fill_(1)
                    param.grad = -start  # up to 1 + 2^-10, where bf16 has 1 and 1 + 2^-7
            optimizer.step()
            patterns += [rounded_up(start, param) for param in params]
    expected = 1 / 8
    assert all(float(pattern.mean()) == pytest.approx(expected, abs=0.09) for pattern in patterns)
    for index, one in enumerate(patterns):
        for other in patterns[:index]:
            assert float((one * other).mean()) < expected / 2  # 1/64 where independent


def test_the_name_decides_and_not_the_place() -> None:
    forward, one = make(names="ab")
    backward, other = make(names="ba")
    train(forward, one, range(3))
    train(backward, other, range(3))
    assert equal(forward, backward[::-1])
    assert not torch.equal(*forward)


def test_wrappers_are_no_part_of_a_name() -> None:
    """A run that compiles its model repeats one that does not, as checkpoints load from one into the other."""
    wrapped, one = make(names=["_orig_mod.layers.0.w", "layers.1._checkpoint_wrapped_module.w"])
    bare, other = make(names=["layers.0.w", "layers.1.w"])
    train(wrapped, one, range(3))
    train(bare, other, range(3))
    assert equal(wrapped, bare)


def test_a_parameter_without_a_gradient_draws_as_if_it_had_had_one() -> None:
    """The count is the group's: what one parameter misses moves no other's numbers, and none are drawn twice."""
    params, optimizer = make()
    twins, other = make()
    train(params, optimizer, range(2))
    train(twins, other, range(1))
    twins[0].grad = None
    twins[1].grad = params[1].grad
    other.step()
    assert torch.equal(params[1], twins[1])
    train(twins, other, range(2, 3))
    train(params, optimizer, range(2, 3))
    assert torch.equal(params[1], twins[1])


def test_rounding_switched_on_later_draws_for_the_present_step() -> None:
    params, optimizer = make(stochastic_rounding=False)
    train(params, optimizer, range(3))
    optimizer.param_groups[0]["stochastic_rounding"] = True
    twins, other = make()
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    other.load_state_dict(optimizer.state_dict())
    train(params, optimizer, range(3, 5))
    train(twins, other, range(3, 5))
    assert equal(params, twins)


def test_fp32_parameters_of_such_a_group_are_not_rounded() -> None:
    options = {"algorithm": "lion", "stochastic_rounding": True}
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = dmuown.Muown([{"params": [param], **options}], lr=2**-12, weight_decay=0.0)
    train([param], optimizer, range(1))
    assert set(param.unique().tolist()) == {1 - 2**-12, 1 + 2**-12}


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 2, 2, 2)], ids=str)
def test_parameters_of_any_shape(shape: tuple[int, ...]) -> None:
    param = torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    group = {"params": [param], "algorithm": "lion", "stochastic_rounding": True}
    optimizer = dmuown.Muown([group], lr=2**-7, weight_decay=0.0)
    param.grad = -torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param, torch.full(shape, 1 + 2**-7).bfloat16())


# --------------------------------------------------------------------------------- replays


@pytest.mark.parametrize("kept_by", ["state_dict", "copy"])
@pytest.mark.parametrize("kept_at", [2, 4])
def test_replays_count_for_themselves(monkeypatch: pytest.MonkeyPatch, kept_at: int, kept_by: str) -> None:
    """A graph of one's own draws for the step that it replays; checkpoints and copies know how many there were.

    Recording is told to the optimizer alone: what would be recorded is done, and the host's count is held still.
    """
    params, optimizer = make("adamw", capturable=True)
    steadily, reference = make("adamw", capturable=True)
    train(steadily, reference, range(6))
    train(params, optimizer, range(1))
    with monkeypatch.context() as recording:
        recording.setattr("dmuown.engine.rounding.is_recording", lambda: True)
        for step in range(1, kept_at):
            count = optimizer.param_groups[0]["step"]
            train(params, optimizer, range(step, step + 1))
            optimizer.param_groups[0]["step"] = count
    if kept_by == "copy":
        resumed = copy.deepcopy(optimizer)
        twins = resumed.param_groups[0]["params"]
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["param_groups"][0]["step"] == kept_at
        twins, resumed = make("adamw", capturable=True)
        with torch.no_grad():
            for twin, param in zip(twins, params, strict=True):
                twin.copy_(param)
        resumed.load_state_dict(saved)
    for some, stepped in ((params, optimizer), (twins, resumed)):
        train(some, stepped, range(kept_at, 6))
        assert equal(some, steadily)


def test_a_captured_step_counts_for_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dmuown.capture` counts on the host beside its graph; ordinary steps after it go on from there."""
    params, optimizer = make("lion")
    steadily, reference = make("lion")
    train(steadily, reference, range(6))
    train(params, optimizer, range(2))
    with monkeypatch.context() as recording:
        recording.setattr("dmuown.engine.rounding.is_recording", lambda: True)
        for step in range(2, 4):
            train(params, optimizer, range(step, step + 1))
            optimizer.param_groups[0]["step"] = 2
    optimizer.param_groups[0]["step"] = 4
    train(params, optimizer, range(4, 6))
    assert equal(params, steadily)


def test_saving_counts_replays_and_leaves_the_groups_alone() -> None:
    """One rank may save alone; its groups must not part from the others', which are compared when one is added."""
    param = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = dmuown.Muown([("w", param)], lr=0.01, stochastic_rounding=True, capturable=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    for clock in optimizer._roundings._clocks.values():
        clock.count.add_(3)  # as three replays of a graph do
    assert optimizer.state_dict()["param_groups"][0]["step"] == 4
    assert copy.deepcopy(optimizer).param_groups[0]["step"] == 4
    assert optimizer.param_groups[0]["step"] == 1
