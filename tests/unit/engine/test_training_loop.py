"""What a training loop does around a step: accumulation, clipping, scaling, schedulers, zeroing; and invariant 7."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown

ALGORITHMS = ["muon", "normuon", "muown", "normuown", "angular_muown", "adamw", "adam", "lion"]


def optimizer_of(params: list[nn.Parameter], algorithm: str, **options: Any) -> dmuown.Muon:
    decay = 0.0 if algorithm == "angular_muown" else 0.1
    if algorithm not in ("adamw", "adam", "lion"):
        options.setdefault("ns_dtype", torch.float32)
    nonfinite = options.pop("nonfinite", "propagate")
    group = {"params": params, "algorithm": algorithm, "weight_decay": decay, **options}
    return dmuown.Muon([group], lr=0.05, nonfinite=nonfinite)


def weights(count: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(6, 4, generator=generator)) for _ in range(count)]


def gradients(count: int = 3, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(70 + step)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_accumulated_gradients_are_their_sum_and_orthogonalized_once(algorithm: str) -> None:
    calls = []

    def counted(x: Tensor, epsilon: float) -> Tensor:
        calls.append(len(x))
        return x / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)

    params, twins = weights(), weights()
    group = {"params": params, "algorithm": algorithm, "weight_decay": 0.0}
    optimizer = dmuown.Muon([group], lr=0.05, newton_schulz_func=counted)
    other = dmuown.Muon([{**group, "params": twins}], lr=0.05, newton_schulz_func=counted)
    for step in range(2):
        for part in range(3):
            for param, grad in zip(params, gradients(step=3 * step + part), strict=True):
                param.grad = grad if param.grad is None else param.grad + grad
        for param, twin in zip(params, twins, strict=True):
            assert param.grad is not None
            twin.grad = param.grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if algorithm in ALGORITHMS[:5]:
            assert sum(calls) == 3  # three matrices, once
            assert optimizer.orthogonalized == 3
        other.step()
        calls.clear()
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_grad(algorithm: str, set_to_none: bool) -> None:
    """Set to none, a step leaves parameters alone; set to zero, it is a step with a gradient of zero."""
    params = weights()
    optimizer = optimizer_of(params, algorithm)
    for param, grad in zip(params, gradients(), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    for old, param in zip(before, params, strict=True):
        assert torch.equal(old, param) is set_to_none
        assert (param.grad is None) is set_to_none
        assert param.isfinite().all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_learning_rate_in_a_tensor_is_the_same_number(algorithm: str) -> None:
    """Schedulers that write tensors into groups, or fill the one that is there."""
    results = []
    for kind in ("float", "written", "filled"):
        params = weights()
        optimizer = optimizer_of(params, algorithm)
        group = optimizer.param_groups[0]
        if kind == "filled":
            group["lr"] = torch.tensor(0.0)
        for step, lr in enumerate((0.02, 0.05, 0.01)):
            if kind == "filled":
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr if kind == "float" else torch.tensor(lr)
            for param, grad in zip(params, gradients(step=step), strict=True):
                param.grad = grad
            optimizer.step()
        results.append(torch.stack([param.detach() for param in params]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(results[2], results[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    ],
)
def test_schedulers_drive_the_step(algorithm: str, scheduler: Callable[[Any], Any]) -> None:
    params, twins = weights(), weights()
    optimizer, other = optimizer_of(params, algorithm), optimizer_of(twins, algorithm)
    schedule = scheduler(optimizer)
    for step in range(4):
        other.param_groups[0]["lr"] = float(schedule.get_last_lr()[0])
        for param, twin, grad in zip(params, twins, gradients(step=step), strict=True):
            param.grad, twin.grad = grad, grad.clone()
        optimizer.step()
        schedule.step()
        other.step()
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grad_scaler_scales_back_and_skips_what_overflowed(algorithm: str) -> None:
    params, twins = weights(1), weights(1)
    optimizer, other = optimizer_of(params, algorithm), optimizer_of(twins, algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        target = gradients(1, step)[0]
        if step == 1:
            target = target * float("inf")
        loss = (params[0] * target).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            twins[0].grad = target
            other.step()
    torch.testing.assert_close(params[0], twins[0], rtol=1e-6, atol=1e-7)
    assert scaler.get_scale() == 2.0**7
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("width", [16, 256])
def test_clipping_raw_gradients_leaves_the_orthogonal_update(width: int) -> None:
    """DeepSpeed#8439, #7776: clipping the update instead divides the step by the size of the model."""
    moved = []
    for clip in (None, 1e-3):
        param = nn.Parameter(torch.zeros(width, 8))
        optimizer = dmuown.Muon([param], lr=1.0, weight_decay=0.0, adjust_lr=None, ns_dtype=torch.float32)
        param.grad = torch.randn(width, 8, generator=torch.Generator().manual_seed(8))
        if clip is not None:
            nn.utils.clip_grad_norm_([param], clip)
        optimizer.step()
        moved.append(param.detach())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-3)
    assert torch.linalg.svdvals(moved[1]).min() > 0.8


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_foreach_key_changes_nothing(algorithm: str, foreach: bool | None) -> None:
    params, twins = weights(), weights()
    optimizer, other = optimizer_of(params, algorithm, foreach=foreach), optimizer_of(twins, algorithm)
    for param, twin, grad in zip(params, twins, gradients(), strict=True):
        param.grad, twin.grad = grad, grad.clone()
    optimizer.step()
    other.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"nonfinite": "skip"}, {"batch_size": 1}])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_stay_and_storage_stays_in_place(algorithm: str, options: dict[str, Any]) -> None:
    """Invariant 7: parameters and state change in place; the caller's gradients are left as they were."""
    if algorithm in ("adamw", "adam", "lion") and "batch_size" in options:
        options = {}
    params, kept = weights(), gradients()
    optimizer = optimizer_of(params, algorithm, **options)
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad.clone()
    grads = [param.grad for param in params]
    places = [param.data_ptr() for param in params]
    state = [{key: value.data_ptr() for key, value in optimizer.state[param].items()} for param in params]
    before = [param.detach().clone() for param in params]
    for _ in range(3):  # an odd number: a gradient negated in place would be itself again after two
        optimizer.step()
    for index, param in enumerate(params):
        assert param.grad is grads[index]
        assert torch.equal(param.grad, kept[index])  # type: ignore[arg-type]
        assert param.data_ptr() == places[index]
        assert {key: value.data_ptr() for key, value in optimizer.state[param].items()} == state[index]
        assert not torch.equal(param, before[index])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_do_not_depend_on_batches_or_order(algorithm: str) -> None:
    """Invariant 2: bucket size and the order of parameters."""

    def train(order: list[int], **options: Any) -> list[Tensor]:
        params = weights(4)
        optimizer = optimizer_of([params[index] for index in order], algorithm, **options)
        for step in range(3):
            for param, grad in zip(params, gradients(4, step), strict=True):
                param.grad = grad
            optimizer.step()
        return [param.detach() for param in params]

    expected = train([0, 1, 2, 3])
    variants = [train([3, 1, 0, 2])]
    if algorithm in ALGORITHMS[:5]:
        variants += [train([0, 1, 2, 3], batch_size=size) for size in (1, 3)]
    for variant in variants:
        for got, whole in zip(variant, expected, strict=True):
            torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-6)
