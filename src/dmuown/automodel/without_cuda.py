"""Importing this module calls `dmuown.automodel.cpu.enable()`.

For the host's own command, whose loader imports every value of a `*_fn` key on each rank:

    plugin_fn: dmuown.automodel.without_cuda
"""

from __future__ import annotations

from dmuown.automodel import cpu

cpu.enable()
