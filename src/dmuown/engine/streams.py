"""Side streams for the tasks of a step that is being recorded: the tail of one bucket's kernels runs beside another's.

A kernel whose last round of tiles fills only some of the multiprocessors leaves the others idle until it ends.
Kernels of another stream start there.
"""

from __future__ import annotations

from collections.abc import Generator

import torch


class SideStreams:
    """Streams that take tasks in turn.

    Only for recording: what is allocated on a side stream stays in the graph's own pool, so that no memory returns
    to a stream that has not waited for its last reader.

    Args:
        count: How many.
        device: Of the streams.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._next = 0

    def __enter__(self) -> None:
        """Let the side streams wait for what the current stream has been given so far."""
        current = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(current)
        self._next = 0

    def __exit__(self, *failure: object) -> None:
        """Let the current stream wait for the side streams."""
        current = torch.cuda.current_stream()
        for stream in self._streams:
            current.wait_stream(stream)

    def run(self, work: Generator[None, None, None]) -> Generator[None, None, None]:
        """The same work, every part of it on the next stream."""
        stream = self._streams[self._next % len(self._streams)]
        self._next += 1
        while True:
            with torch.cuda.stream(stream):
                try:
                    next(work)
                except StopIteration:
                    return
            yield


__all__ = ["SideStreams"]
