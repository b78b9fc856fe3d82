"""The update rules: a registry of rows, each a name, its options, its declared state and its mathematics."""

from dmuown.algorithms import angular_muown, elementwise, muon, muown, normuon  # noqa: F401  (they register themselves)
from dmuown.algorithms.base import (
    Algorithm,
    ElementwiseAlgorithm,
    MuonAlgorithm,
    get_algorithm,
    is_registered,
    loaded_algorithms,
    register_muon_algorithm,
    registered_algorithms,
    source_of,
)
from dmuown.algorithms.batch import DeclaredState, MatrixBatch, Work
from dmuown.algorithms.whole import orthogonalize_batch, orthogonalize_single
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
    "is_registered",
    "loaded_algorithms",
    "orthogonalize_batch",
    "orthogonalize_single",
    "register_muon_algorithm",
    "registered_algorithms",
    "source_of",
]
