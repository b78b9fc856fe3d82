"""Checkpoints: state dicts keyed by canonical name, atomic folders, and other libraries' state.

`get_*` and `set_*` speak torch's forms and work with torch DCP. `save_checkpoint` and
`load_checkpoint` add atomic replacement and reading that executes nothing. `convert_optimizer_state`
turns state of other libraries' optimizers into this package's.
"""

from dmuown.checkpoint.files import load_checkpoint, read_checkpoint, save_checkpoint
from dmuown.checkpoint.importers import convert_optimizer_state
from dmuown.checkpoint.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = [
    "convert_optimizer_state",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "load_checkpoint",
    "read_checkpoint",
    "save_checkpoint",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]
