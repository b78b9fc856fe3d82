"""Parameters that are elsewhere, legal transitions, and tensors in structures."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dmuown.errors import OwnershipError
from dmuown.ownership.away import AwayParameter, make_away, released_tensor
from dmuown.ownership.record import GradState, State, check_transition, record_of
from dmuown.ownership.tree import map_tensors, tensors


@pytest.fixture
def linear() -> nn.Linear:
    module = nn.Linear(3, 4)
    make_away(cast("nn.Parameter", module.weight), "body.weight", "rank 5")
    return module


def test_an_away_parameter_says_what_it_is(linear: nn.Linear) -> None:
    weight = linear.weight
    assert isinstance(weight, AwayParameter)
    assert isinstance(weight, nn.Parameter)
    assert weight.untyped_storage().nbytes() == 0
    assert (weight.shape, weight.dtype, weight.device.type, weight.ndim) == ((4, 3), torch.float32, "cpu", 2)
    assert (weight.numel(), weight.size(1), weight.stride(), len(weight)) == (12, 3, (3, 1), 4)
    assert weight.is_leaf
    assert weight.requires_grad
    assert not weight.requires_grad_(False).requires_grad
    assert "body.weight" in repr(weight)
    assert "rank 5" in repr(weight)
    assert linear.state_dict()["weight"].device.type == "meta"
    assert weight.data.device.type == "meta"
    assert weight in {weight}
    linear.zero_grad()


def test_an_away_parameter_follows_moves(linear: nn.Linear) -> None:
    weight = linear.weight
    linear.to(torch.float64)
    linear.to_empty(device="cpu")
    assert linear.weight is weight
    assert weight.dtype == torch.float64
    assert weight.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: p.sum(),
        lambda p: p[0],
        lambda p: p.T,
        lambda p: p.mT,
        lambda p: p.tolist(),
        lambda p: p.copy_(torch.ones(4, 3)),
        lambda p: nn.init.zeros_(p),
        lambda p: torch.zeros_like(p),
        lambda p: torch.cat([torch.ones(1, 3), p]),
        lambda p: torch.stack(tensors=[p]),
        lambda p: nn.functional.linear(torch.ones(2, 3), p),
        lambda p: torch.ones(2, 3) @ p.t(),
        lambda p: pickle.dumps(p),
    ],
)
def test_reading_an_away_parameter_names_it_and_its_owner(linear: nn.Linear, use: Callable[[Tensor], object]) -> None:
    with pytest.raises(OwnershipError, match=r"body\.weight: holds no data on this rank.*it is on rank 5"):
        use(linear.weight)


def test_optimizers_leave_away_parameters_alone(linear: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(linear.parameters())
    linear.bias.grad = torch.ones(4)
    optimizer.step()
    optimizer.zero_grad()
    assert list(optimizer.state) == [linear.bias]
    assert record_of(linear.weight) is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)])
def test_released_tensors(shape: tuple[int, ...]) -> None:
    tensor = released_tensor(shape, torch.bfloat16, torch.device("cpu"))
    assert tuple(tensor.shape) == shape
    assert tensor.stride() == torch.empty(shape).stride()
    assert tensor.untyped_storage().nbytes() == 0


def test_transitions() -> None:
    legal = {
        (State.HOME, State.FETCHING),
        (State.FETCHING, State.WHOLE),
        (State.WHOLE, State.HOME),
        (GradState.NONE, GradState.COLLECTING),
        (GradState.COLLECTING, GradState.REDUCING),
        (GradState.COLLECTING, GradState.NONE),
        (GradState.REDUCING, GradState.NONE),
    }
    for kind in (State, GradState):
        for current in kind:
            for following in kind:
                if (current, following) in legal:
                    check_transition(current, following, "layers.0")
                else:
                    with pytest.raises(OwnershipError, match=r"layers\.0: cannot go from"):
                        check_transition(current, following, "layers.0")


@dataclass
class Output:
    loss: Tensor
    rest: tuple[Tensor, ...]
    note: str = ""


Pair = namedtuple("Pair", "first second")


class Mapped(OrderedDict[str, object]):
    pass


def test_tensors_are_found_in_structures() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    value = {"x": [a, 3], "y": Pair(b, None), "z": Output(c, (a,)), "w": Mapped(k=b)}
    assert [tensor.numel() for tensor in tensors(value)] == [1, 2, 3, 1, 2]
    assert list(tensors(None)) == []
    assert list(tensors("text")) == []


def test_mapping_keeps_classes_and_untouched_objects() -> None:
    a, n = torch.zeros(1), torch.zeros(1, dtype=torch.long)

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    value: Any
    for value in ([a, n], (a, 1), Pair(a, n), Output(a, (n,), "kept"), Mapped(k=a, note="x"), {"k": a}):
        mapped = map_tensors(widen, value)
        assert type(mapped) is type(value)
        assert mapped is not value
        assert next(tensors(mapped)).dtype == torch.float64
        assert next(tensors(value)).dtype == torch.float32
    assert map_tensors(widen, Output(a, (n,), "kept")).note == "kept"
    for value in ([n, None], (n,), Pair(n, 1), Output(n, (n,)), Mapped(k=n), {"k": n}, "text", None):
        assert map_tensors(widen, value) is value
