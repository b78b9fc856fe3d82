"""Count what goes over process groups, whoever sends it: this package, FSDP2, DDP or a training loop.

Used as a context around a forward, backward or step::

    with TrafficCounter() as traffic:
        loss(model).backward()
    print(traffic.bytes, traffic.kinds)

Calls are counted where torch's operations dispatch, so independently of what a plan says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch's own names of the operations that `torch.distributed` calls.
_KINDS = {
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "gather_": "gather",
    "scatter_": "scatter",
}


class TrafficCounter(TorchDispatchMode):
    """Counts collectives of this process while it is entered, in backward passes too.

    Bytes are of the whole buffer of a collective: what is broadcast, reduced or gathered, the larger side of a
    reduce-scatter or all-to-all. Over all ranks each moves that, times world size minus one, for all of these but
    all-reduces (twice that) and all-to-alls (that, once).

    Attributes:
        kinds: By kind of collective, `[collectives, bytes]`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name in _KINDS:
            sides = [_bytes(arg) for arg in (*args, *(kwargs or {}).values())]
            entry = self.kinds[_KINDS[name]]
            entry[0] += 1
            entry[1] += max(sides, default=0)
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> int:
        """Collectives of all kinds."""
        return sum(count for count, _ in self.kinds.values())

    @property
    def bytes(self) -> int:
        """Bytes of all kinds."""
        return sum(size for _, size in self.kinds.values())


def _bytes(argument: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
