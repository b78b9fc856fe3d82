"""Options of an orthogonalizer and of a group: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuown
from dmuown.errors import DmuownError, MissingDependencyError, OptionError, OptionTypeError
from dmuown.orthogonalize import Orthogonalizer, backends, resolve_orthogonalizer, select_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"scheme": "newton_shulz"}, "^scheme: must be one of .* Did you mean 'newton_schulz'"),
        ({"scheme": None}, "^scheme: must be one of"),
        ({"coefficients": "kellr"}, "^coefficients: .* Did you mean 'keller'"),
        ({"coefficients": "polar_express"}, "^coefficients: .* Use scheme 'polar_express' or 'gram'"),
        ({"scheme": "polar_express", "coefficients": "you"}, "Use scheme 'newton_schulz' or 'gram'"),
        ({"coefficients": []}, "^coefficients: must be"),
        ({"norm": "max"}, "^ns_norm: must be one of 'add', 'clamp'"),
        ({"form": "gramm"}, "^ns_form: .* Did you mean 'gram'"),
        ({"scheme": "gram", "form": "plain"}, "^ns_form: must not be 'plain'"),
        ({"backend": "tritton"}, "^backend: .* Did you mean 'triton'"),
        ({"dtype": torch.int32}, "^ns_dtype: must be one of"),
        ({"dtype": "float31"}, "^ns_dtype: .* Did you mean"),
        ({"dtype": None}, "^ns_dtype: "),
        *[({"steps": steps}, "^ns_steps: must be an int of at least 1") for steps in (0, -1, True, 5.0, "5", None)],
        *[
            ({"epsilon": epsilon}, "^ns_epsilon: must be a finite number above 0")
            for epsilon in (0, 0.0, -1e-7, float("nan"), float("inf"), True, "1e-7", None, torch.zeros(2))
        ],
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Orthogonalizer(**options)


def test_function_must_be_callable() -> None:
    with pytest.raises(OptionTypeError, match=r"^newton_schulz_func: must be callable, got int"):
        Orthogonalizer(function=5)  # type: ignore[arg-type]


def test_equal_spellings_are_equal_and_hash_alike() -> None:
    first = Orthogonalizer()
    second = Orthogonalizer(coefficients="keller", epsilon=torch.tensor(1e-7, dtype=torch.float64))  # type: ignore[arg-type]
    assert first == second
    custom = {Orthogonalizer(coefficients=[[1, 2, 3]]), Orthogonalizer(coefficients=((1, 2, 3),))}
    assert len({first, second} | custom) == 2


def test_group_keys_reach_their_fields() -> None:
    options = {
        "scheme": "newton_schulz", "coefficients": "you", "ns_steps": 3, "ns_epsilon": 1e-5, "ns_dtype": "float16",
        "ns_norm": "clamp", "ns_form": "plain", "backend": "torch", "lr": 1.0, "mu": 0.9,
    }  # fmt: skip
    expected = Orthogonalizer("newton_schulz", "you", 3, 1e-5, torch.float16, "clamp", "plain", "torch")
    assert resolve_orthogonalizer(options, CPU) == expected


def test_absent_keys_take_the_defaults() -> None:
    keller = resolve_orthogonalizer({"ns_dtype": "bf16"}, CPU)
    assert (keller.scheme, keller.coefficients, keller.steps, keller.epsilon) == ("newton_schulz", "keller", 5, 1e-7)
    assert keller.dtype == torch.bfloat16
    assert resolve_orthogonalizer({"orthogonalization_strategy": "gram"}, CPU).coefficients == "polar_express"


def test_scheme_and_its_alias_must_agree() -> None:
    both = {"scheme": "gram", "orthogonalization_strategy": "gram"}
    assert resolve_orthogonalizer(both, CPU).scheme == "gram"
    with pytest.raises(OptionError, match=r"^scheme: disagrees with orthogonalization_strategy"):
        resolve_orthogonalizer({**both, "scheme": "polar_express"}, CPU)


def test_auto_dtype_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, avx, expected in (
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        assert resolve_orthogonalizer({"ns_dtype": "auto"}, CPU).dtype == expected
        assert resolve_orthogonalizer({}, CPU).dtype == expected
        assert resolve_orthogonalizer({"scheme": "gram"}, CPU).dtype == expected
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_orthogonalizer({}, cuda).dtype == torch.float16
    assert resolve_orthogonalizer({"ns_form": "plain"}, cuda).dtype == torch.bfloat16
    assert resolve_orthogonalizer({"newton_schulz_func": torch.sign}, cuda).dtype == torch.bfloat16
    assert resolve_orthogonalizer({"scheme": "gram"}, cuda).dtype == torch.float16
    assert resolve_orthogonalizer({"scheme": "gram", "ns_dtype": "bfloat16"}, cuda).dtype == torch.bfloat16


def test_engine_info_says_what_auto_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert dmuown.engine_info().ns_dtype == "float32 on cpu"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    told = "bfloat16 on cpu, float16 on cuda (bfloat16 with ns_form='plain')"
    assert f"ns_dtype: {told}" in str(dmuown.engine_info()).splitlines()


def test_a_missing_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._MODULES, "quack", "dmuown_no_such_module")
    backends._load.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"^backend='quack': needs .* Install quack"):
        select_backend("quack", CPU, torch.float32, (1, 8, 8))
    with pytest.raises(ImportError):
        Orthogonalizer(backend="quack")(torch.randn(3, 4))
    backends._load.cache_clear()


def test_auto_is_torch_on_cpu() -> None:
    assert select_backend("auto", CPU, torch.float32, (1, 4096, 4096)).name == "torch"
    with pytest.raises(DmuownError, match="Did you mean 'torch'"):
        select_backend("troch", CPU, torch.float32, (1, 8, 8))
