"""State of the optimizers: its declaration, allocation, low-bit storage and offload."""

from dmuown.state.spec import BufferSpec

__all__ = ["BufferSpec"]
