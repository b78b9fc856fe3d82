"""Errors that name the parameter or key, the rule it broke, and the remedy.

Every error raised on purpose by this package derives from `DmuownError` and from the built-in
class that callers of torch optimizers already catch (`ValueError`, `TypeError`, ...).
"""

from __future__ import annotations


class DmuownError(Exception):
    """Base of all errors of this package.

    Args:
        subject: The parameter name, option or configuration key at fault.
        rule: What it must satisfy, and what it was instead.
        remedy: What the reader can do about it; may be empty where the rule says it all.
    """

    def __init__(self, subject: str, rule: str, remedy: str = "") -> None:
        self.subject = subject
        self.rule = rule
        self.remedy = remedy
        super().__init__(f"{subject}: {rule}." + (f" {_sentence(remedy)}" if remedy else ""))

    def __reduce__(self) -> tuple[type[DmuownError], tuple[str, str, str]]:
        # The default reduction replays `args`, which holds the one formatted message.
        return type(self), (self.subject, self.rule, self.remedy)


def _sentence(remedy: str) -> str:
    """Return a remedy with the mark that ends it: a question mark where all it does is to ask what was meant."""
    asks = remedy.startswith("Did you mean ") and "? " not in remedy
    return remedy.rstrip(".") + ("?" if asks else ".")


def install_extra(extra: str) -> str:
    """Return how to install an extra of this package, as part of a remedy: from a clone, since no index has it."""
    return f'pip install ".[{extra}]" in a clone of dmuown'


class OptionError(DmuownError, ValueError):
    """A hyper-parameter, group key, policy field or configuration key has a bad value."""


class OptionTypeError(DmuownError, TypeError):
    """A hyper-parameter or argument has a type that no value of it could have."""


class ParameterError(DmuownError, ValueError):
    """A parameter cannot be optimized as asked: shape, dtype, device or group."""


class LayoutError(DmuownError, ValueError):
    """A parameter's DTensor mesh or placements cannot be supported."""


class GradientError(DmuownError, RuntimeError):
    """A gradient is sparse, non-finite or laid out unlike its parameter."""


class CheckpointError(DmuownError, RuntimeError):
    """A checkpoint is missing, truncated, or belongs to something else."""


class PlanMismatchError(DmuownError, RuntimeError):
    """Ranks disagree on what they are about to communicate."""


class OwnershipError(DmuownError, RuntimeError):
    """A dedicated parameter was used against the rules of the ownership runtime."""


class MissingDependencyError(DmuownError, ImportError):
    """An optional dependency is needed and absent, or present in an unusable version."""
