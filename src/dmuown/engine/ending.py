"""The end of a program whose ranks communicate through gloo.

A thread of gloo says that a collective is done, and drops its tensors a moment later. For one that Python knows it asks
for the interpreter's lock; an interpreter that is shutting down ends threads that ask, and in a C++ destructor that
ends the process: `terminate called without an active exception` (pytorch/pytorch#190489). Collectives of ours are over
when their tensors have been dropped, where `engine.lent` lends them. Those of torch, of FSDP2, and of the program
itself, such as a loss averaged over ranks, are not: the program gives up the lock for a moment before it ends.
`destroy_process_group()` does not help under FSDP2, since caches of torch keep the group and so its threads.
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
