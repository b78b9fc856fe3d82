"""Low-bit, bf16 and offloaded state, master weights and stochastic rounding: bytes, accuracy, resume, fallbacks."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.errors import MissingDependencyError, OptionError, ParameterError
from dmuown.state import lowbit, shards, working
from dmuown.state.lowbit import storage_bytes
from tests.unit.algorithms import variants as variants
from tests.unit.algorithms.oracles import initial

ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown", "my_variant", "adamw", "adam", "lion")
MATRIX = ALGORITHMS[:6]

#: Bytes per element of each choice, scales included.
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128, "fp8": 1 + 4 / 256}

#: How far weights may be from the fp32 run's after the steps of `train`, relative to their movement.
ACCURACY = {"fp32": 0.0, "bf16": 0.05, "int8": 0.1, "int4": 0.6, "fp8": 0.15}

SHAPE = (64, 96)


def make(algorithm: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE, **options: Any) -> Any:
    param = torch.nn.Parameter(initial(*shape, dtype=dtype))
    if algorithm != "adamw" and algorithm != "adam" and algorithm != "lion":
        options.setdefault("ns_dtype", "float32")
    return param, dmuown.Muon([{"params": [param], "algorithm": algorithm, **options}], lr=0.02, weight_decay=0.0)


def train(param: Tensor, optimizer: torch.optim.Optimizer, steps: range = range(8)) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        common = torch.randn(param.shape, generator=torch.Generator().manual_seed(99))
        param.grad = (common + torch.randn(param.shape, generator=generator)).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_and_accuracy(algorithm: str, precision: str) -> None:
    """State bytes per element as declared, plus at most 5 fp32 numbers a row; weights near the fp32 run's."""
    param, optimizer = make(algorithm, state_precision=precision)
    exact, reference = make(algorithm)
    start = param.detach().clone()
    train(param, optimizer)
    train(exact, reference)
    state = optimizer.state[param]
    shaped = {key: value for key, value in state.items() if value.shape == param.shape}
    for value in shaped.values():
        assert storage_bytes(value) == BYTES[precision] * param.numel()
    rows = sum(value.numel() for key, value in state.items() if key not in shaped and value.dim() > 0)
    assert rows <= 5 * SHAPE[0]
    assert sum(map(storage_bytes, state.values())) <= len(shaped) * BYTES[precision] * param.numel() + 4 * (rows + 1)
    error = float((param.detach() - exact.detach()).norm() / (exact.detach() - start).norm())
    assert error <= ACCURACY[precision], error
    if precision in ("int8", "int4", "fp8"):
        assert lowbit.is_low_bit(state["momentum_buffer" if algorithm == "my_variant" else "momentum"])


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8", "bf16"])
@pytest.mark.parametrize("algorithm", ["muown", "normuon", "my_variant", "adamw"])
def test_resume_is_bit_identical(algorithm: str, precision: str) -> None:
    """Invariant 4, through a file read with weights_only=True."""
    param, optimizer = make(algorithm, state_precision=precision)
    train(param, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "param": param.detach()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make(algorithm, state_precision=precision)
    with torch.no_grad():
        other.copy_(saved["param"])
    resumed.load_state_dict(saved["optimizer"])
    train(param, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert torch.equal(param, other)


@pytest.mark.parametrize("written, read", [("int8", "fp32"), ("fp32", "int8"), ("int8", "int4"), ("fp8", None)])
def test_another_precision_on_resume(written: str, read: str | None) -> None:
    """The precision is a setting of the run: state of one loads into buffers of another."""
    param, optimizer = make("muown", state_precision=written)
    train(param, optimizer, range(4))
    other, resumed = make("muown", state_precision=read)
    with torch.no_grad():
        other.copy_(param)
    resumed.load_state_dict(optimizer.state_dict())
    before = lowbit.decoded(optimizer.state[param]["momentum"])
    after = lowbit.decoded(resumed.state[other]["momentum"])
    assert (after - before).norm() <= {"int4": 0.2, "int8": 0.02}.get(str(read), 0) * before.norm()
    assert resumed.param_groups[0]["state_precision"] == read
    train(other, resumed, range(4, 6))


def test_shapes_that_cannot_hold_low_bit_state_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        odd = torch.nn.Parameter(initial(7, 9, dtype=torch.float32))
        optimizer = dmuown.Muown([("blocks.0.odd", odd)], state_precision="int4")
    assert not lowbit.is_low_bit(optimizer.state[odd]["momentum"])
    assert optimizer.state[odd]["momentum"].dtype == torch.float32
    (message,) = [record.getMessage() for record in caplog.records if "blocks" in record.getMessage()]
    assert message.startswith("blocks.0.odd.momentum: shards of shape (7, 9) do not divide into the blocks that int4")


def test_smaller_blocks_serve_awkward_shapes() -> None:
    param = torch.nn.Parameter(initial(5, 64, dtype=torch.float32))
    assert lowbit.block_size_for(param, "int8") == 64
    assert lowbit.block_size_for(param, "int4") == 64
    assert lowbit.block_size_for(torch.nn.Parameter(torch.ones(4, 256)), "int8") == 256
    assert lowbit.block_size_for(torch.nn.Parameter(torch.ones(5, 7)), "int8") is None


def test_cuts_of_shards_follow_torch_chunk() -> None:
    for length in range(9):
        for parts in (1, 2, 3, 4, 5):
            chunks = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else [0]
            assert shards._cut(length, parts, 1) == {*chunks, *([0] if len(chunks) < parts else [])}
    assert shards._cut(10, 2, 2) == {6, 4}  # pieces of 5 are cut 3 + 2 each


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lowbit._CLASSES, "int8", ("no_such_module", "Nothing"))
    with pytest.raises(MissingDependencyError, match=r"state_precision='int8': needs torchao.*\.\[lp\]"):
        make("muown", state_precision="int8")


@pytest.mark.parametrize("value", ["int3", 8, "4bit"])
def test_unknown_precisions_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="state_precision: must be None or one of 'fp32', 'bf16', 'int8'"):
        make("muown", state_precision=value)
    with pytest.raises(OptionError, match="stochastic_rounding: excludes master_weights"):
        make("muown", master_weights=True, stochastic_rounding=True)
    with pytest.raises(ParameterError, match="is float16, which stochastic rounding is not for"):
        make("muown", torch.float16, stochastic_rounding=True)
    for seed in (1.0, "1", True, None):
        with pytest.raises(OptionError, match="param group 0: rounding_seed: must be an integer"):
            make("muown", torch.bfloat16, stochastic_rounding=True, rounding_seed=seed)


# --------------------------------------------------------------------------------- MuonLP


def test_muon_lp_is_muon_with_low_bit_state() -> None:
    param = torch.nn.Parameter(initial(*SHAPE, dtype=torch.float32))
    optimizer = dmuown.MuonLP([param], lr=0.02)
    assert type(optimizer.state[param]["momentum"]).__name__ == "OptimState8bit"
    assert optimizer.param_groups[0]["algorithm"] == "muon"
    four = dmuown.MuonLP([torch.nn.Parameter(initial(*SHAPE, dtype=torch.float32))], state_precision="int4")
    assert four.param_groups[0]["state_precision"] == "int4"


# --------------------------------------------------------------------------------- 16-bit weights


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_train_as_fp32_parameters(algorithm: str, dtype: torch.dtype) -> None:
    """16-bit parameters with masters equal the fp32 run, rounded, when both see the same gradients."""
    param, optimizer = make(algorithm, dtype, master_weights=True, state_precision="fp32")
    exact = torch.nn.Parameter(param.detach().float())
    options = {"ns_dtype": "float32"} if algorithm in MATRIX else {}
    reference = dmuown.Muon([{"params": [exact], "algorithm": algorithm, **options}], lr=0.02, weight_decay=0.0)
    for step in range(6):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        param.grad, exact.grad = grad, grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.state[param]["master_weight"], exact)
    assert torch.equal(param, exact.to(dtype))


def test_masters_keep_what_16_bits_would_lose() -> None:
    """2^-12 of a weight is below bf16's resolution: without masters nothing moves."""
    results = {}
    for masters in (False, True):
        param = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        group = {"params": [param], "algorithm": "lion", "master_weights": masters}
        optimizer = dmuown.Muon([group], lr=2**-12, weight_decay=0.0)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            optimizer.step()
        results[masters] = param.detach()
    assert torch.equal(results[False], torch.ones(8, 8, dtype=torch.bfloat16))
    assert torch.equal(results[True], torch.full((8, 8), 1 - 64 * 2**-12).bfloat16())


def test_masters_follow_weights_that_were_loaded() -> None:
    param, optimizer = make("muon", torch.bfloat16, master_weights=True)
    train(param, optimizer, range(2))
    fresh, loaded = make("muon", torch.bfloat16, master_weights=True)
    with torch.no_grad():
        fresh.copy_(param)
    state = optimizer.state_dict()
    del state["state"][0]["master_weight"]  # as a run without masters writes it
    loaded.load_state_dict(state)
    fresh.grad = torch.zeros_like(fresh)
    loaded.state[fresh]["momentum"].zero_()
    loaded.step()
    assert torch.equal(fresh, param)


def test_resyncing_takes_masters_from_the_weights_too() -> None:
    param, optimizer = make("muown", torch.bfloat16, master_weights=True)
    train(param, optimizer, range(2))
    averaged = torch.randn(param.shape).bfloat16()
    with torch.no_grad():
        param.copy_(averaged)
    optimizer.resync_magnitudes()
    assert torch.equal(optimizer.state[param]["master_weight"].bfloat16(), averaged)
    optimizer.param_groups[0]["lr"] = 0.0
    train(param, optimizer, range(1))
    torch.testing.assert_close(param.detach(), averaged, rtol=2**-7, atol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stochastic_rounding_moves_bf16_weights_as_far_as_fp32_ones(algorithm: str) -> None:
    param, optimizer = make(algorithm, torch.bfloat16, stochastic_rounding=True, state_precision="fp32")
    exact, reference = make(algorithm, torch.float32)
    with torch.no_grad():
        exact.copy_(param)
    reference.resync_magnitudes()
    start = exact.detach().clone()
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["lr"] = 1e-4
    train(param, optimizer, range(30))
    train(exact, reference, range(30))
    error = (param.detach().float() - exact.detach()).mean().abs() / (exact.detach() - start).abs().mean()
    assert float(error) < 0.25


# --------------------------------------------------------------------------------- offload


@pytest.mark.parametrize("precision", [None, "int8"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_offload_changes_nothing(algorithm: str, precision: str | None) -> None:
    """On a machine without an accelerator, state is where it would be anyway: equal, and no copy is made."""
    param, optimizer = make(algorithm, offload_state=True, state_precision=precision)
    exact, reference = make(algorithm, state_precision=precision)
    train(param, optimizer)
    train(exact, reference)
    assert torch.equal(param, exact)


class Elsewhere(working.WorkingSet):
    """Copies everything, as if state lived on another device."""

    copied_all = 0

    def load(self, stored: Tensor, **options: Any) -> Tensor:
        loaded = super().load(stored, **options)
        if loaded is stored:
            loaded = stored.clone()
            self._copies.append(working._Copy(stored, loaded))
            Elsewhere.copied_all += 1
        return loaded


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_loaded_is_stored(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip of offloading, made to happen on one device: every buffer and weight is written back."""
    exact, reference = make(algorithm)
    train(exact, reference)
    Elsewhere.copied_all = 0
    monkeypatch.setattr("dmuown.engine.planning.WorkingSet", Elsewhere)
    monkeypatch.setattr("dmuown.engine.optimizer.WorkingSet", Elsewhere)
    param, optimizer = make(algorithm)
    train(param, optimizer)
    assert Elsewhere.copied_all >= 8 * 2
    assert torch.equal(param, exact)
    for key, value in reference.state[exact].items():
        assert torch.equal(optimizer.state[param][key], value), key


def test_plain_state_is_worked_on_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[working.WorkingSet] = []

    class Recorded(working.WorkingSet):
        def store(self) -> None:
            made.append(self)
            super().store()

    monkeypatch.setattr("dmuown.engine.planning.WorkingSet", Recorded)
    param, optimizer = make("normuown")
    train(param, optimizer, range(2))
    assert [one.copied for one in made] == [0, 0]


def test_batch_size_bounds_what_is_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []

    class Counted(Elsewhere):
        def store(self) -> None:
            loads.append(sum(copy.working.numel() for copy in self._copies))
            super().store()

    monkeypatch.setattr("dmuown.engine.planning.WorkingSet", Counted)
    params = [torch.nn.Parameter(initial(8, 8, dtype=torch.float32)) for _ in range(40)]
    for batch_size, expected in ((None, [14, 14, 12]), (10, [10] * 4)):
        loads.clear()
        optimizer = dmuown.Muon(params, offload_state=True, batch_size=batch_size)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert loads == [2 * 64 * count for count in expected]


def test_a_step_waits_for_its_own_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later step that is recorded into a graph would fail if it waited."""

    class Stream:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    device, stream = torch.device("cuda", 0), Stream()
    monkeypatch.setattr(working, "_streams", {device: stream})
    for expected in (1, 2):
        working.copy_stream(device)
        working.copy_stream(device)
        working.finish_copies()
        assert stream.waits == expected
        working.finish_copies()
        assert stream.waits == expected


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_offloaded_state_on_the_gpu(algorithm: str, precision: str | None) -> None:
    """State on the host, pinned; results equal to the bit; device memory bounded by the batch."""
    results = []
    for offload in (False, True):
        params = [torch.nn.Parameter(initial(*SHAPE, dtype=torch.float32, seed=i).cuda()) for i in range(9)]
        group: dict[str, Any] = {"params": params, "algorithm": algorithm, "state_precision": precision}
        group["offload_state"] = offload
        if algorithm in MATRIX:
            group["batch_size"] = 2
        optimizer = dmuown.Muon([group], lr=0.02, weight_decay=0.0)
        for step in range(4):
            for index, param in enumerate(params):
                generator = torch.Generator().manual_seed(100 * step + index)
                param.grad = torch.randn(SHAPE, generator=generator).cuda()
            optimizer.step()
        if offload:
            momentum: Any = next(iter(optimizer.state[params[0]].values()))
            assert momentum.device.type == "cpu"
            assert precision or momentum.is_pinned()
        results.append([param.detach().cpu() for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parameters_on_the_host_take_a_round_trip(algorithm: str) -> None:
    param, optimizer = make(algorithm, foreach=True)
    exact = torch.nn.Parameter(param.detach().cuda())
    options = {"ns_dtype": "float32"} if algorithm in MATRIX else {}
    reference = dmuown.Muon([{"params": [exact], "algorithm": algorithm, **options}], lr=0.02, weight_decay=0.0)
    for step in range(3):
        grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        param.grad, exact.grad = grad, grad.cuda()
        optimizer.step()
        reference.step()
    assert param.device.type == "cpu"
    # Row norms are first taken where the weights are, and host and card add up in another order.
    same_bits = "magnitude" not in optimizer.state[param]
    difference = (param - exact.cpu()).norm() / param.norm()
    assert torch.equal(param, exact.cpu()) if same_bits else difference < 1e-6
