"""A whole training step of a 1B Llama on one device: what an optimizer adds to fused AdamW.

Llama-1B widths, 16 layers, vocabulary 32,000; bf16 compute over fp32 parameters through FSDP2 of one
rank; 8 micro-batches of 2 x 4096 tokens a step (65,536). On CPU a model of a hundredth of the width, two
micro-batches of 2 x 64.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, default_device, measure, peak_memory
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import dmuown


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a step."""

    width: int = 2048
    inner: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    sequence: int = 4096
    batch: int = 2
    micro_batches: int = 8


SMALL = Shape(64, 256, 2, 4, 2, 512, 64, 2, 2)


class Block(nn.Module):
    """Grouped-query attention with rotary positions, and SwiGLU; pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head = shape.width // shape.heads
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * head, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * head, bias=False)
        self.o = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(batch, length, -1, self.head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Llama(nn.Module):
    """Token embedding, blocks, norm, untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        head = shape.width // shape.heads
        angles = torch.outer(torch.arange(shape.sequence), 1e4 ** (-torch.arange(0, head, 2) / head))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss of [batch, sequence + 1] tokens."""
        x = self.embedding(tokens[:, :-1])
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(shape: Shape, device: torch.device) -> nn.Module:
    """The model under FSDP2 of one rank, fp32 parameters, bf16 compute."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(shape)
    if device.type != "cuda":
        return model
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else)."""
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    chosen = set(matrices)
    return matrices, [p for p in model.parameters() if p not in chosen]


def optimizers() -> dict[str, Callable[[nn.Module], Any]]:
    """By name, what makes an object with `step` and `zero_grad` for a model."""

    def adamw(model: nn.Module) -> Any:
        cuda = next(model.parameters()).device.type == "cuda"
        return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=cuda)

    def ours(kind: str, capture: bool = False, **options: Any) -> Callable[[nn.Module], Any]:
        def make(model: nn.Module) -> Any:
            matrices, rest = split(model)
            groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "weight_decay": 0.1}]
            optimizer = getattr(dmuown, kind)(groups, lr=3e-4, **options)
            return dmuown.capture(optimizer) if capture else optimizer

        return make

    return {
        "torch AdamW fused": adamw,
        "dmuown Muown": ours("Muown"),
        "dmuown Muown captured": ours("Muown", capture=True),
        "dmuown Muon keller": ours("Muon", scheme="newton_schulz", coefficients="keller"),
    }


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--only", default="", help="comma-separated substrings of the names to run")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = default_device()
    shape = Shape() if device.type == "cuda" else SMALL
    if device.type == "cuda":
        method = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("nccl", init_method=method, rank=0, world_size=1)
    report = Report("training_step", device, path=arguments.output, shape=vars(shape))
    wanted = [part for part in arguments.only.split(",") if part]
    generator = torch.Generator(device=device).manual_seed(1)
    size = (shape.micro_batches, shape.batch, shape.sequence + 1)
    tokens = torch.randint(shape.vocabulary, size, device=device, generator=generator)
    base = 0.0
    for name, make in optimizers().items():
        captured = "captured" in name
        if (wanted and not any(part in name for part in wanted)) or (captured and device.type != "cuda"):
            continue
        model = make_model(shape, device)
        optimizer = make(model)
        losses: list[Tensor] = []

        def backward(model: nn.Module = model, losses: list[Tensor] = losses) -> None:
            total = torch.zeros((), device=device)
            for batch in tokens:
                loss = model(batch) / len(tokens)
                loss.backward()
                total += loss.detach()
            losses.append(total)

        def step(optimizer: Any = optimizer, backward: Callable[[], None] = backward) -> None:
            backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4 if captured else 2):
            step()
        timing = measure(step, device, warmup=0, repeats=arguments.repeats, seconds=30.0)
        backward()
        memory = peak_memory(optimizer.step, device)
        alone = measure(optimizer.step, device, warmup=1, repeats=5)
        base = base or timing.median
        report.add(
            name=name,
            step=timing,
            optimizer=alone,
            over_adamw=timing.median / base - 1,
            temporary_gib=memory,
            first_loss=float(losses[0]),
            last_loss=float(losses[-1]),
        )
        if captured:
            optimizer.release()
        del model, optimizer, backward, step
    report.write()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
