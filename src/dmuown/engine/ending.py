"""The end of a program whose ranks communicate through gloo.

A thread of gloo that still holds a tensor while the interpreter shuts down ends the process (see `engine.lent`). What
is lent is given back in time; what torch, FSDP2 and the program itself communicate, such as a loss averaged over ranks,
is not lent. So the program gives up the interpreter's lock for a moment before it ends. `destroy_process_group()` does
not help under FSDP2, since caches of torch keep the group and so its threads.
"""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist

#: Seconds: five times what sufficed for threads that only get what time other processes leave (docs/lab-log.md).
_PAUSE = 0.05


def end_gently() -> None:
    """Make this process, if it communicates, pause before it ends."""
    if dist.is_available() and dist.is_initialized():
        _pause_at_exit()


@functools.cache
def _pause_at_exit() -> None:
    atexit.register(time.sleep, _PAUSE)
