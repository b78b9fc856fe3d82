"""The update rules: a registry of rows, each a name, its options, its declared state and its mathematics."""

from dmuown.algorithms import angular_muown, elementwise, muon, muown, normuon  # noqa: F401  (they register themselves)
from dmuown.algorithms.base import (
    Algorithm,
    ElementwiseAlgorithm,
    MuonAlgorithm,
    get_algorithm,
    loaded_algorithms,
    register_muon_algorithm,
    registered_algorithms,
)
from dmuown.algorithms.batch import DeclaredState, MatrixBatch, Work
from dmuown.state import BufferSpec

__all__ = [
    "Algorithm",
    "BufferSpec",
    "DeclaredState",
    "ElementwiseAlgorithm",
    "MatrixBatch",
    "MuonAlgorithm",
    "Work",
    "get_algorithm",
    "loaded_algorithms",
    "register_muon_algorithm",
    "registered_algorithms",
]
