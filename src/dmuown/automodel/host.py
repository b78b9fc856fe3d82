"""Which versions of the host, NeMo AutoModel, this package works with, and whether one is installed."""

from __future__ import annotations

from importlib import metadata

from dmuown.errors import MissingDependencyError, install_extra

DISTRIBUTION = "nemo-automodel"
SUPPORTED = "0.7.*"
"""The versions whose optimizer configs, scheduler and loading code this package was written against."""

_INSTALL = f"Install it with: {install_extra('automodel')}"


def installed_version() -> str | None:
    """Version of the installed host, or None without one. Imports nothing of the host."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def require_host() -> str:
    """Return the version of the installed host.

    Raises:
        MissingDependencyError: There is no host, or one outside `SUPPORTED`.
    """
    version = installed_version()
    if version is None:
        raise MissingDependencyError(DISTRIBUTION, "is not installed", _INSTALL)
    if version.split(".")[:2] != SUPPORTED.split(".")[:2]:
        raise MissingDependencyError(
            DISTRIBUTION,
            f"version {version} is installed, and dmuown.automodel works with {SUPPORTED} only",
            f'Install a version that works: pip install "{DISTRIBUTION}=={SUPPORTED}"',
        )
    return version
