"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os

# Before torch is imported: ranks and test workers share few cores, and thread pools would only fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests make what they need: a model or data set looked up on a hub is a mistake, and should fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.distributed.harness import RankPool

# `make test` draws the same few examples every time; `make fuzz` draws many new ones.
hypothesis.settings.register_profile("test", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("test")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def ranks2() -> Iterator[RankPool]:
    """Two gloo ranks that live as long as a test module: idle ranks still poll."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def ranks4() -> Iterator[RankPool]:
    """Four gloo ranks that live as long as a test module."""
    with RankPool(4) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the GPU need one: where there is none they are skipped, saying so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
