"""The kernels on the card: every orientation and size against float64, poisoned outputs, repeatability, capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.algorithms import fused
from dmuown.errors import GradientError
from dmuown.kernels import chain, table, triton_operations
from dmuown.orthogonalize import Orthogonalizer
from dmuown.orthogonalize.backends import TORCH, run_one_by_one
from dmuown.orthogonalize.stages import Stage, count_places, plan_stages
from tests.unit.kernels.interpreted.inputs import KINDS, falling_spectra, matrices

pytestmark = pytest.mark.gpu

SIZES = [
    (3, 1024, 1536),
    (2, 200, 328),
    (1, 576, 1000),
    (5, 8, 24),
    (40, 384, 64),
    (7, 640, 2048),
    (2, 33, 17),
    (1, 2048, 512),
]
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 2e-6}


def error(value: Tensor, reference: Tensor) -> float:
    """Relative Frobenius distance in float64."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def operands(kind: str, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """a, b, c of `products.multiply`, and whether the result is symmetric."""
    batch, m, n = size
    generator = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    if kind == "gram":
        x = normal(batch, m, n)
        return x, x.mT, None, True
    if kind == "gram_transposed":
        x = normal(batch, n, m).mT
        return x, x.mT, None, True
    if kind == "polynomial":
        a = normal(batch, m, m)
        a = (a + a.mT) / 2
        return a, a, a, True
    x = normal(batch, m, n) if "transposed" not in kind else normal(batch, n, m).mT
    return normal(batch, m, m), x, x if kind.startswith("add") else None, False


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "kind", ["gram", "gram_transposed", "polynomial", "product", "add", "product_transposed", "add_transposed"]
)
def test_products(kind: str, dtype: torch.dtype) -> None:
    from dmuown.kernels.products import multiply

    for size in SIZES:
        a, b, c, symmetric = operands(kind, size, dtype)
        out = torch.empty_like(b) if not symmetric else torch.empty_like(a @ b)
        out.fill_(float("nan"))
        shift = 1.5 if kind == "polynomial" else 0.0
        multiply(a, b, c=c, alpha=0.5, beta=0.25, shift=shift, symmetric=symmetric, out=out)
        reference = 0.5 * a.double() @ b.double()
        if c is not None:
            reference += 0.25 * c.double()
        if shift:
            reference += shift * torch.eye(a.shape[1], device="cuda").double()
        assert error(out, reference) < TOLERANCE[dtype], size
        if symmetric:
            assert torch.equal(out, out.mT), size
        again = torch.empty_like(out)
        multiply(a, b, c=c, alpha=0.5, beta=0.25, shift=shift, symmetric=symmetric, out=again)
        assert torch.equal(out, again), size


@pytest.mark.parametrize("kind", [*KINDS, "falling"])
def test_products_and_normalization_of_difficult_inputs(kind: str) -> None:
    """In bf16, whose range holds them, and in fp32; stored by rows and by columns."""
    from dmuown.kernels import panels
    from dmuown.kernels.normalize import normalize
    from dmuown.kernels.products import multiply

    for dtype in (torch.bfloat16, torch.float32):
        for size in ((3, 264, 520), (2, 384, 1024)):
            x = (falling_spectra(*size) if kind == "falling" else matrices(kind, *size)).cuda().to(dtype)
            q = torch.randn(size[0], size[1], size[1], device="cuda").to(dtype) / size[1]
            for given in (x, x.mT.contiguous().mT):
                gram = multiply(given, given.mT, symmetric=True, out=torch.full_like(q, float("nan")))
                assert error(gram, x.double() @ x.double().mT) < TOLERANCE[dtype], (dtype, size)
                moved = multiply(q, given, c=given, beta=0.5, out=torch.full_like(given, float("nan")))
                assert error(moved, q.double() @ x.double() + 0.5 * x.double()) < TOLERANCE[dtype], (dtype, size)
                turned = given.clone()
                if panels.multiply(q, turned, torch.full_like(q, float("nan")), 1):
                    turned = torch.roll(turned, -256 if given.stride(-1) == 1 else -128, dims=-1)
                    assert error(turned, q.double() @ x.double()) < TOLERANCE[dtype], (dtype, size)
                else:
                    assert dtype == torch.float32
                unit_norm = normalize(given, torch.float16, factor=1.0, epsilon=1e-20, clamp=False)
                assert unit_norm is not None
                assert error(unit_norm, x.double() / x.double().norm(dim=(1, 2), keepdim=True)) < 1e-3, (dtype, size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_non_finite_matrix_leaves_its_neighbours_alone(dtype: torch.dtype) -> None:
    orthogonalizer = Orthogonalizer(backend="triton", dtype=dtype)
    for shape in ((4, 200, 328), (4, 256, 256), (4, 640, 64)):
        x = torch.randn(*shape, device="cuda")
        clean = orthogonalizer(x)
        x[2, 3, 5] = float("inf")
        spoilt = orthogonalizer(x)
        assert torch.equal(clean[[0, 1, 3]], spoilt[[0, 1, 3]])
        assert not spoilt[2].isfinite().all()


CHAINS = [(1, 8, 24), (2, 136, 1000), (2, 384, 384), (5, 200, 264), (16, 1024, 2048), (1, 2048, 4096), (3, 2056, 2064)]
# Several tiles of a stage for every program, each short enough for the ring.
SHORT_CHAINS = [(600, 64, 128), (600, 128, 256), (400, 256, 512), (100, 320, 640)]
CHAIN_SHAPES = {
    "turns": table._CHAIN_TURNS,
    "turns, gram apart": table._CHAIN_TURNS._replace(with_gram=False),
    "wide": table._CHAIN_WIDE,
}


def unit(batch: int, m: int, n: int, dtype: torch.dtype, tall: bool = False) -> Tensor:
    """Matrices of norm 1, wide, stored by rows or by columns."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    x = torch.randn((batch, n, m) if tall else (batch, m, n), device="cuda", generator=generator)
    x = x / x.norm(dim=(1, 2), keepdim=True)
    return (x.mT if tall else x).to(dtype)


def make_stages(x: Tensor, steps: int, run: Callable[[Tensor, Tensor, list[Stage]], object]) -> Tensor:
    """Q of a run of so many steps; everything that nobody writes is NaN."""
    triples = Orthogonalizer(scheme="newton_schulz", coefficients="keller").table.for_steps(steps)
    stages = plan_stages(triples)
    batch, m, _ = x.shape
    places = torch.full((count_places(stages), batch, m, m), float("nan"), dtype=x.dtype, device="cuda")
    run(x, places, stages)
    return places[stages[-1].out]


@pytest.mark.parametrize("shape", CHAIN_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tall", [False, True], ids=["rows", "columns"])
def test_chains_equal_a_kernel_for_each_stage(
    tall: bool, dtype: torch.dtype, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_by_one(x: Tensor, places: Tensor, stages: list[Stage]) -> None:
        run_one_by_one(triton_operations.operations(), x, places, stages)

    def exactly(x: Tensor, places: Tensor, stages: list[Stage]) -> None:
        run_one_by_one(TORCH, x, places, stages)

    monkeypatch.setattr(table, "chain_shape", lambda batch, m, stages: CHAIN_SHAPES[shape])
    for size in CHAINS:
        x = unit(*size, dtype, tall)
        for steps in (1, 2, 3):
            chained = make_stages(x, steps, chain.run)
            exact = make_stages(x.double(), steps, exactly)
            assert error(chained, exact) < 1.3 * error(make_stages(x, steps, one_by_one), exact) + 1e-5, (size, steps)
            assert torch.equal(chained, make_stages(x, steps, chain.run)), (size, steps)


@pytest.mark.parametrize("shape", CHAIN_SHAPES)
@pytest.mark.parametrize("size", SHORT_CHAINS, ids=str)
def test_chains_of_many_short_tiles(size: tuple[int, int, int], shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading runs two tiles ahead of storing there: a tile's addend must not land on what is still to be stored."""
    monkeypatch.setattr(table, "chain_shape", lambda batch, m, stages: CHAIN_SHAPES[shape])
    x = unit(*size, torch.float16)
    first = make_stages(x, 3, chain.run)
    exact = make_stages(x.double(), 3, lambda x, places, stages: run_one_by_one(TORCH, x, places, stages))
    assert error(first, exact) < 5e-3
    for _ in range(30):
        assert torch.equal(make_stages(x, 3, chain.run), first)


@pytest.mark.parametrize("shape", CHAIN_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "falling", "one_entry", "zero"])
def test_chains_survive_difficult_inputs(
    kind: str, dtype: torch.dtype, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near to float64 as torch's products are."""
    monkeypatch.setattr(table, "chain_shape", lambda batch, m, stages: CHAIN_SHAPES[shape])
    ran: list[bool] = []
    chained = chain.run

    def watched(x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
        ran.append(chained(x, places, stages))
        return ran[-1]

    monkeypatch.setattr(chain, "run", watched)
    for size in ((3, 136, 264), (2, 384, 640)):
        x = (matrices(kind, *size) if kind in KINDS else falling_spectra(*size)).cuda()
        if kind in ("zero", "one_entry"):
            x.zero_()
            x[0, 5, 7] = float(kind == "one_entry")
        common: dict[str, Any] = {"scheme": "newton_schulz", "coefficients": "keller", "form": "gram"}
        ours = Orthogonalizer(**common, backend="triton", dtype=dtype)(x)
        theirs = Orthogonalizer(**common, backend="torch", dtype=dtype)(x)
        exact = Orthogonalizer(**common, backend="torch", dtype=torch.float64)(x)
        distance, reach = ((value.double() - exact).norm() for value in (ours, theirs))
        assert distance <= (1.8 * reach if kind == "falling" else 1.3 * reach + 2e-3 * exact.norm()), (size, kind)
    assert ran
    assert all(ran)


@pytest.mark.parametrize("shape", CHAIN_SHAPES)
def test_chains_on_two_streams_share_a_card(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has all its programs on the card at once; a tile must not wait for a program that cannot start."""
    monkeypatch.setattr(table, "chain_shape", lambda batch, m, stages: CHAIN_SHAPES[shape])
    xs = [unit(4, 1024, 1536, torch.float16), unit(40, 256, 512, torch.float16)]
    alone = [make_stages(x, 3, chain.run) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    for _ in range(20):
        torch.cuda.synchronize()
        together: list[Tensor] = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(make_stages(x, 3, chain.run))
        torch.cuda.synchronize()
        for value, reference in zip(together, alone, strict=True):
            assert torch.equal(value, reference)


@pytest.mark.parametrize("shape", CHAIN_SHAPES)
def test_a_non_finite_matrix_does_not_leave_its_place_in_a_chain(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "chain_shape", lambda batch, m, stages: CHAIN_SHAPES[shape])
    x = unit(4, 200, 328, torch.float16)
    clean = make_stages(x, 3, chain.run)
    x[2, 3, 5] = float("inf")
    spoilt = make_stages(x, 3, chain.run)
    assert torch.equal(clean[[0, 1, 3]], spoilt[[0, 1, 3]])
    assert not spoilt[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 64, 64), (7, 33, 17), (40, 512, 640), (3, 4096, 2048)])
def test_normalize(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    from dmuown.kernels.normalize import normalize

    x = (torch.randn(*size, device="cuda") * torch.logspace(-2, 2, size[0], device="cuda")[:, None, None]).to(dtype)
    x[0, 0, 0] = float("nan")
    exact = x.double() / (x.double().norm(dim=(1, 2), keepdim=True) + 1e-7)
    for turned in (False, True):
        given = x.mT if turned else x
        result = normalize(given, torch.float16, factor=1.0, epsilon=1e-7, clamp=False)
        assert result is not None
        assert error(result[1:], (exact.mT if turned else exact)[1:]) < 1e-3 if size[0] > 1 else True
        assert result[0].isnan().all()
        again = normalize(given, torch.float16, factor=1.0, epsilon=1e-7, clamp=False)
        assert again is not None
        assert torch.equal(result[1:], again[1:])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_orthogonalization_matches_torch(scale: float) -> None:
    for shape in ((3, 256, 640), (2, 512, 192), (3, 384, 384), (2, 33, 17), (1, 72, 40)):
        x = torch.randn(*shape, device="cuda") * scale
        ours = Orthogonalizer(backend="triton", dtype=torch.float16)(x)
        exact = Orthogonalizer(backend="torch", dtype=torch.float64)(x)
        assert error(ours, exact) < 5e-3, shape


Spoil = Callable[[Tensor], Tensor]


def build(kind: str, transposed: bool, **options: Any) -> tuple[Any, list[nn.Parameter], torch.Generator]:
    """An optimizer of matrices of many sizes and one vector, and where their gradients come from."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    shapes = [(256, 640)] * 3 + [(512, 192)] * 2 + [(2, 64, 128)] * 2 + [(72, 40), (33, 17), (16, 2048), (16, 8192)]
    if transposed:
        shapes = [(*shape[:-2], shape[-1], shape[-2]) for shape in shapes]
    parameters = [nn.Parameter(torch.randn(*shape, device="cuda", generator=generator) * 0.05) for shape in shapes]
    vector = nn.Parameter(torch.ones(64, device="cuda"))
    groups = [{"params": parameters, "matrix_transposed": transposed}, {"params": [vector], "algorithm": "adamw"}]
    return getattr(dmuown, kind)(groups, lr=0.02, **options), [*parameters, vector], generator


def train(
    kind: str, transposed: bool, capture: bool = False, steps: int = 6, spoil: Spoil = torch.clone, **options: Any
) -> list[Tensor]:
    """Weights after some steps on a falling learning rate, of gradients that `spoil` has changed."""
    optimizer, parameters, generator = build(kind, transposed, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    stepper = dmuown.capture(optimizer) if capture else optimizer
    for index in range(steps):
        for parameter in parameters:
            gradient = spoil(torch.randn(parameter.shape, device="cuda", generator=generator))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        if index == 4 and optimizer.param_groups[0]["weight_decay"]:
            optimizer.param_groups[0]["weight_decay"] *= 2
        stepper.step()
        scheduler.step()
    assert optimizer.param_groups[0]["step"] == steps
    return [parameter.detach().clone() for parameter in parameters]


SPOILT: dict[str, Spoil] = {
    "tiny": lambda gradient: gradient * 1e-10,
    "huge": lambda gradient: gradient * 1e10,
    "rank one": lambda gradient: gradient[..., :1] * torch.ones_like(gradient),
    "badly scaled": lambda gradient: (
        gradient * torch.logspace(-4, 4, gradient.shape[-1], device="cuda").to(gradient.dtype)
    ),
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("kind", ["Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"])
def test_fused_steps_on_difficult_gradients_equal_the_phases(
    kind: str, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orthogonalized in fp32, where what the two halves round does not grow."""
    options = {**options_of(kind), "ns_dtype": torch.float32, "steps": 3, "spoil": SPOILT[spoilt], "ns_steps": 1}
    own = train(kind, False, **options)
    monkeypatch.setattr(fused, "before", lambda *arguments: None)
    phases = train(kind, False, **options)
    assert all(value.isfinite().all() for value in own)
    for value, reference in zip(own, phases, strict=True):
        assert error(value, reference) < 1e-4, spoilt


def options_of(kind: str) -> dict[str, Any]:
    """Options that exercise decay, and that capture accepts."""
    return {"decay_degree": 0} if kind == "AngularMuown" else {"weight_decay": 0.1}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"])
def test_fused_and_captured_steps_equal_the_phases(
    kind: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(kind)
    own = train(kind, transposed, **options)
    again = train(kind, transposed, **options)
    captured = train(kind, transposed, capture=True, **options)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "before", lambda *arguments: None)
        phases = train(kind, transposed, **options)
    for value, repeat, replayed, reference in zip(own, again, captured, phases, strict=True):
        assert torch.equal(value, repeat)
        # Live learning rates and bias corrections are fp32, which moves some directions by a bf16 rounding.
        assert error(replayed, value) < 2e-4
        # The two round momentum to bf16 from values that differ in their last fp32 bits.
        assert error(value, reference) < 2e-3


def test_capture_refuses_a_missing_gradient() -> None:
    optimizer, parameters, _ = build("Muown", False)
    captured = dmuown.capture(optimizer)
    for parameter in parameters[1:]:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(GradientError, match="no gradient"):
        captured.step()


def test_gradients_that_move_are_followed() -> None:
    results = []
    for moving in (False, True):
        optimizer, parameters, generator = build("Muown", False)
        captured = dmuown.capture(optimizer)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(5):
            for parameter in parameters:
                gradient = torch.randn(parameter.shape, device="cuda", generator=generator)
                if moving:
                    parameter.grad = gradient
                else:
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradient)
            captured.step()
        results.append([parameter.detach().clone() for parameter in parameters])
    for still, moved in zip(*results, strict=True):
        assert torch.equal(still, moved)
