"""What the host needs without CUDA: applied only there, once, reversibly, and for the right host."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmuown.automodel import cpu, host
from dmuown.errors import MissingDependencyError


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu.disable()
    yield
    cpu.disable()


@pytest.mark.usefixtures("no_cuda")
def test_enable_and_disable(caplog: pytest.LogCaptureFixture) -> None:
    infrastructure = importlib.import_module("nemo_automodel._transformers.infrastructure")
    before = (torch.cuda.reset_peak_memory_stats, torch.cuda.current_device, infrastructure.apply_model_infrastructure)
    with caplog.at_level(logging.INFO):
        patches = cpu.enable()
        assert cpu.enable() == patches
    assert len(patches) == 3
    assert sum("No CUDA device" in text for text in caplog.messages) == 1
    assert all(patch.name in caplog.text for patch in patches)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.current_device() == 0
    cpu.disable()
    assert before == (
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.current_device,
        infrastructure.apply_model_infrastructure,
    )


@pytest.mark.usefixtures("no_cuda")
def test_models_are_placed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    infrastructure = importlib.import_module("nemo_automodel._transformers.infrastructure")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(infrastructure, "apply_model_infrastructure", lambda model, **options: seen.update(options))
    # Two modules of the host hold their own reference, one of them imported only afterwards.
    early, late = (type(sys)(f"nemo_automodel.{name}") for name in ("early", "late"))
    vars(early)["apply_model_infrastructure"] = infrastructure.apply_model_infrastructure
    monkeypatch.setitem(sys.modules, early.__name__, early)
    original = infrastructure.apply_model_infrastructure
    cpu.enable()
    vars(late)["apply_model_infrastructure"] = infrastructure.apply_model_infrastructure
    monkeypatch.setitem(sys.modules, late.__name__, late)
    early.apply_model_infrastructure(None, device=torch.device("cuda", 0), mesh=1)
    assert seen == {"device": torch.device("cpu"), "mesh": 1}
    cpu.disable()
    assert early.apply_model_infrastructure is late.apply_model_infrastructure is original


def test_nothing_happens_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    assert cpu.enable() == ()
    assert torch.cuda.current_device is before


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("version", ["0.6.1", "0.8.0", "1.7.0"])
def test_another_host_is_refused_with_the_versions_that_work(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: version)
    before = torch.cuda.current_device
    with pytest.raises(MissingDependencyError, match=rf"version {version} is installed.*0\.7\.\*"):
        cpu.enable()
    assert torch.cuda.current_device is before


def test_a_missing_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed_version", lambda: None)
    with pytest.raises(MissingDependencyError, match=r'is not installed.*pip install "\.\[automodel\]" in a clone'):
        host.require_host()
