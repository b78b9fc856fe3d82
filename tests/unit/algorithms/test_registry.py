"""The registry: third-party algorithms in the whole-tensor form, what they get, and registrations that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown import BufferSpec, MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms import get_algorithm, orthogonalize_batch, orthogonalize_single, registered_algorithms
from dmuown.algorithms.base import _registry
from dmuown.algorithms.whole import using_options
from dmuown.errors import CheckpointError, OptionError, OptionTypeError
from dmuown.orthogonalize import Orthogonalizer, resolve_compute_dtype
from tests.reference.orthogonalize import by_blocks, polar_express
from tests.unit.algorithms.oracles import assert_near, gradients, initial
from tests.unit.algorithms.variants import MyBatchedVariant, MyVariant

# ruff: noqa: RUF012


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Any:
    before = dict(_registry)
    yield
    _registry.clear()
    _registry.update(before)


def oracle(weight: Tensor, grads: list[Tensor], lr: float, alpha: float, blocks: Any = None) -> Tensor:
    """MyVariant in float64; a block takes the scale it would have as a parameter of its own."""
    weight, momentum, sizes = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight[..., :1])
    m, n = weight.shape[-2:]
    scale = torch.full((m, 1), math.sqrt(max(1, m / n)), dtype=torch.float64)
    for block in blocks or []:
        scale[block] = math.sqrt(max(1, len(range(m)[block]) / n))
    for grad in grads:
        momentum = alpha * momentum + grad
        sizes = alpha * sizes + grad.square().sum(-1, keepdim=True).sqrt()
        update = by_blocks(momentum, blocks, lambda x: polar_express(x, epsilon=1e-8, safety_factor=1.02))
        weight = weight - lr * scale * update / (1 + sizes)
    return weight


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        before = param.grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, before)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("name", ["my_variant", "my_batched_variant"])
def test_the_specifications_variant_runs(name: str, shape: tuple[int, ...]) -> None:
    weight, grads = initial(*shape), list(gradients(shape))
    param = torch.nn.Parameter(weight.clone())
    group = {"params": [param], "algorithm": name, "alpha": 0.7, "foreach": "batched" in name}
    optimizer = dmuown.Muon([group], lr=0.02, wd=0.0, ns_dtype=torch.float64)
    train(param, optimizer, grads)
    # The rows' state and the ratio are fp32.
    assert_near(param.detach(), oracle(weight, grads, 0.02, 0.7), 1e-6)
    state = optimizer.state[param]
    assert state.keys() == {"momentum_buffer", "row_sizes"}
    assert state["row_sizes"].shape == (*shape[:-1], 1)
    assert optimizer.orthogonalized == math.prod(shape[:-2])


def test_split_sizes_scale_blocks_as_separate_parameters() -> None:
    weight, grads = initial(12, 5), list(gradients((12, 5)))
    param = torch.nn.Parameter(weight.clone())
    group = {"params": [param], "algorithm": "my_variant", "split_sizes": (6, 2, 4)}
    train(param, dmuown.Muon([group], lr=0.02, wd=0.0, ns_dtype=torch.float64), grads)
    blocks = [slice(0, 6), slice(6, 8), slice(8, 12)]
    assert_near(param.detach(), oracle(weight, grads, 0.02, 0.5, blocks), 1e-6)


@pytest.mark.parametrize("storage", [{"matrix_transposed": True}, {"flatten": True}], ids=str)
def test_transposed_and_flattened_storage(storage: dict[str, Any]) -> None:
    weight, grads = initial(6, 12), list(gradients((6, 12)))

    def stored(value: Tensor) -> Tensor:
        return value.mT.contiguous() if "matrix_transposed" in storage else value.reshape(6, 3, 2, 2)

    param = torch.nn.Parameter(stored(weight).clone())
    optimizer = dmuown.Muon(
        [{"params": [param], "algorithm": "my_variant", **storage}], lr=0.02, wd=0.0, ns_dtype="float64"
    )
    train(param, optimizer, [stored(grad) for grad in grads])
    assert_near(param.detach(), stored(oracle(weight, grads, 0.02, 0.5)), 1e-6)


def test_foreach_chooses_the_batched_form() -> None:
    for foreach, expected in ((True, [3]), (None, []), (False, [])):
        MyBatchedVariant.batches.clear()
        params = [torch.nn.Parameter(initial(4, 6)) for _ in range(3)]
        optimizer = dmuown.Muon([{"params": params, "algorithm": "my_batched_variant"}], foreach=foreach)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert MyBatchedVariant.batches == expected, foreach  # None: on for groups on CUDA


def test_options_arrive_under_the_forms_names() -> None:
    seen: dict[str, Any] = {}

    @register_muon_algorithm
    class Recorder(MuonAlgorithm):
        name = "recorder"
        options = {"alpha": 0.5}

        def update(self, param, grad, state, lr_ratio, **options):  # type: ignore[no-untyped-def]
            seen.update(options, lr_ratio=lr_ratio)

    param = torch.nn.Parameter(initial(8, 2, dtype=torch.float32))
    optimizer = dmuown.Muon(
        [{"params": [param], "algorithm": "recorder", "use_cautious_wd": True, "split_sizes": (4, 4)}],
        lr=0.3,
        wd=0.1,
        momentum=0.8,
        nesterov=True,
        ns_steps=3,
        orthogonalization_strategy="newton_schulz",
        maximize=True,
    )
    param.grad = torch.ones_like(param)
    optimizer.step()
    expected = {
        "lr": 0.3,
        "weight_decay": 0.1,
        "momentum": 0.8,
        "nesterov": True,
        "ns_steps": 3,
        "orthogonalization_strategy": "newton_schulz",
        "maximize": False,
        "cautious_wd": True,
        "alpha": 0.5,
        "split_sizes": (4, 4),
    }
    assert {key: seen[key] for key in expected} == expected
    assert float(seen["lr_ratio"]) == 2.0
    assert not {"params", "mu", "scheme"} & seen.keys()


def test_helpers_take_what_is_left_out_from_the_group() -> None:
    x = initial(5, 8)
    same = Orthogonalizer(scheme="polar_express", steps=3, dtype=resolve_compute_dtype(x.device))(x)
    assert torch.equal(orthogonalize_single(x, ns_steps=3, strategy="polar_express"), same.to(x.dtype))
    with using_options({"ns_dtype": torch.float64, "scheme": "polar_express", "ns_steps": 5}):
        assert_near(orthogonalize_single(x), polar_express(x), 1e-10)
    assert orthogonalize_single(x).dtype == x.dtype
    assert orthogonalize_batch([]) == []
    both = orthogonalize_batch([x, 2 * x], ns_steps=5, strategy="newton_schulz")
    torch.testing.assert_close(both[0], both[1], rtol=1e-2, atol=1e-2)
    with pytest.raises(OptionError, match="must sum to the 5 output rows"):
        orthogonalize_single(x, split_sizes=(2, 2))
    with pytest.raises(OptionError, match="Did you mean 'newton_schulz'"):
        orthogonalize_single(x, strategy="newton_shulz")


# --------------------------------------------------------------------------------- refused registrations


def test_duplicate_names_are_refused_and_reloads_are_not() -> None:
    first = type("One", (MyVariant,), {"name": "twice"})
    register_muon_algorithm(first)
    register_muon_algorithm(first)
    with pytest.raises(OptionError, match=r"twice: is already registered by .*One.*another name"):
        register_muon_algorithm(type("Two", (MyVariant,), {"name": "twice"}))
    with pytest.raises(OptionError, match="adamw: is already registered"):
        register_muon_algorithm(type("Mine", (MyVariant,), {"name": "adamw"}))


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"name": ""}, "needs a non-empty name"),
        ({"name": "x", "state_spec": {"buffer": "grad"}}, r"x\.state_spec\['buffer'\]: must be a BufferSpec, got str"),
        ({"name": "x", "state_spec": ["buffer"]}, "must map names to BufferSpec"),
        ({"name": "x", "options": ["alpha"]}, "must map names to defaults"),
        ({"name": "x", "options": {"split_sizes": None}}, "declares 'split_sizes', which every group has"),
        ({"name": "x", "options": {"lr": 1.0}}, "declares 'lr', which every group has"),
    ],
)
def test_wrong_declarations_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        register_muon_algorithm(type("Wrong", (MyVariant,), attributes))
    assert "x" not in registered_algorithms()


def test_what_is_no_algorithm_is_refused() -> None:
    with pytest.raises(OptionTypeError, match="takes a subclass of MuonAlgorithm"):
        register_muon_algorithm(dict)  # type: ignore[type-var]
    with pytest.raises(OptionError, match="defines neither `apply` nor a whole-tensor `update`"):
        register_muon_algorithm(type("Empty", (MuonAlgorithm,), {"name": "empty"}))
    with pytest.raises(OptionError, match=r"BufferSpec\.like: must be one of grad, grad_rows, scalar, got 'rows'"):
        BufferSpec(like="rows")  # type: ignore[arg-type]


def step_of(update: Any, **attributes: Any) -> None:
    register_muon_algorithm(type("Faulty", (MuonAlgorithm,), {"name": "faulty", "update": update, **attributes}))
    param = torch.nn.Parameter(initial(4, 6))
    optimizer = dmuown.Muon([{"params": [param], "algorithm": "faulty"}])
    param.grad = torch.ones_like(param)
    optimizer.step()


def test_undeclared_state_is_refused() -> None:
    def reads(self: Any, param: Tensor, grad: Tensor, state: Any, lr_ratio: Tensor, **_: Any) -> None:
        state["momentum_buffer"].add_(grad)

    with pytest.raises(OptionError, match=r"faulty\.state_spec: declares no buffer 'momentum_buffer', only 'momentum'"):
        step_of(reads)


def test_undeclared_state_is_not_stored() -> None:
    def writes(self: Any, param: Tensor, grad: Tensor, state: Any, lr_ratio: Tensor, **_: Any) -> None:
        state["mine"] = grad

    with pytest.raises(OptionError, match=r"faulty\.state_spec: declares no buffer 'mine'"):
        step_of(writes)


def test_replaced_state_is_refused() -> None:
    def replaces(self: Any, param: Tensor, grad: Tensor, state: Any, lr_ratio: Tensor, **_: Any) -> None:
        state["momentum"] = state["momentum"] + grad

    with pytest.raises(OptionError, match=r"faulty\.update: replaced state\['momentum'\], which is updated in place"):
        step_of(replaces)


def test_returned_values_are_refused() -> None:
    def returns(self: Any, param: Tensor, grad: Tensor, state: Any, lr_ratio: Tensor, **_: Any) -> Tensor:
        return param - grad

    with pytest.raises(OptionError, match=r"faulty\.update: must update param and state in place and return None"):
        step_of(returns)


@pytest.mark.parametrize("phase", ["prepare_gradient", "update_momentum", "shape_update"])
def test_wrong_shapes_from_a_phase_are_refused(phase: str) -> None:
    muon = type(get_algorithm("muon"))

    def generator(self: Any, batch: Any, *_: Any) -> Any:
        return [weight[..., :1] for weight in batch.weights]
        yield

    def function(self: Any, batch: Any, *_: Any) -> Any:
        return [weight[..., :1] for weight in batch.weights]

    wrong = function if phase == "update_momentum" else generator
    register_muon_algorithm(type("Cut", (muon,), {"name": "cut", phase: wrong}))
    param = torch.nn.Parameter(initial(4, 6))
    optimizer = dmuown.Muon([{"params": [param], "algorithm": "cut"}])
    param.grad = torch.ones_like(param)
    with pytest.raises(
        OptionError, match=rf"cut\.{phase}: must return a tensor of shape \(1, 4, 6\) .* got \(1, 4, 1\)"
    ):
        optimizer.step()


def test_unknown_options_and_names_suggest_the_nearest() -> None:
    param = torch.nn.Parameter(initial(4, 6))
    with pytest.raises(OptionError, match=r"param group 0: alhpa: .*Did you mean 'alpha'"):
        dmuown.Muon([{"params": [param], "algorithm": "my_variant", "alhpa": 1.0}])
    with pytest.raises(OptionError, match=r"algorithm: 'my_varient' is not one of .*Did you mean 'my_variant'"):
        dmuown.Muon([{"params": [param], "algorithm": "my_varient"}])


# --------------------------------------------------------------------------------- checkpoints


def test_name_and_options_are_in_the_state_dict() -> None:
    weight, grads = initial(4, 6), list(gradients((4, 6)))
    first = torch.nn.Parameter(weight.clone())
    group = {"algorithm": "my_variant", "alpha": 0.7}
    optimizer = dmuown.Muon([{"params": [first], **group}])
    train(first, optimizer, grads[:5])
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["algorithm"] == "my_variant"
    second = torch.nn.Parameter(first.detach().clone())
    other = dmuown.Muon([{"params": [second], "algorithm": "my_variant"}])
    other.load_state_dict(saved)
    assert other.param_groups[0]["alpha"] == 0.7
    train(first, optimizer, grads[5:])
    train(second, other, grads[5:])
    assert torch.equal(first, second)


def test_an_unregistered_name_says_what_to_import() -> None:
    param = torch.nn.Parameter(initial(4, 6))
    saved = dmuown.Muon([{"params": [param], "algorithm": "my_variant"}]).state_dict()
    saved["param_groups"][0].update(algorithm="their_variant", algorithm_source="their_package.algorithms")
    optimizer = dmuown.Muon([param])
    with pytest.raises(
        CheckpointError, match=r"written by algorithm 'their_variant'.*[Ii]mport their_package\.algorithms"
    ):
        optimizer.load_state_dict(saved)
