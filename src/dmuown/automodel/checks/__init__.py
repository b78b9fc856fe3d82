"""Every error and warning of a recipe's YAML, found without importing the host.

    document   the file: safe loading, line numbers, duplicate keys, overrides
    problems   what is reported
    rules      checks of single values
    sections   the host's sections and the rules of their keys
    targets    what a dotted `_target_` takes, read from its source text
    optimizer  the optimizer's section, checked against our own options
    model      the model's section and its checkpoint folder
    data       data sets: files, columns
    restore    the checkpoint to resume from
    relations  keys that must agree with each other
    run        all of it

Only `deep` imports the host.
"""

from __future__ import annotations

from dmuown.automodel.checks.problems import Problem, Report
from dmuown.automodel.checks.run import check_config

__all__ = ["Problem", "Report", "check_config"]
