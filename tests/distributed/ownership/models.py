"""Small models of the shapes that the runtime meets, and the ways to train them that must agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HIDDEN, SEQUENCE = 40, 16, 24, 6

POLICY: dict[str, Any] = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
        {"name": ["norm", ".bias", "router"], "set": {"route": "adamw"}},
    ],
}


class Block(nn.Module):
    """A gated MLP with a norm, a bias and a residual, as in a Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=True)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: Tensor, *, scale: Tensor | None = None) -> Tensor:
        normed = self.norm(hidden)
        update = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return hidden + (update if scale is None else update * scale)


class MoEBlock(nn.Module):
    """Top-1 routing over a list of experts: an expert without tokens on a rank is not called there."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        weights, chosen = self.router(normed).softmax(-1).max(-1)
        output = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                output[mask] = expert(normed[mask]) * weights[mask].unsqueeze(-1)
        return hidden + output


class Body(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class TinyLM(nn.Module):
    """A causal language model of the usual layout: `model.embed_tokens`, `model.layers`, `lm_head`."""

    def __init__(self, layers: int = 3, *, moe: bool = False, tied: bool = False) -> None:
        super().__init__()
        blocks: list[nn.Module] = [MoEBlock() if moe and index % 2 else Block() for index in range(layers)]
        self.model = Body(blocks)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def build(seed: int = 0, **options: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**options)


def batch(step: int, rank: int, size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (size, SEQUENCE + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
