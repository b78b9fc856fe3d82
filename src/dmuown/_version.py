"""The version, in the one place that the package, its metadata and its checkpoints read it from."""

from __future__ import annotations

__version__ = "0.1.0"
