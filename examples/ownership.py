"""Train a small transformer under the ownership runtime: every parameter lives whole with one rank.

    torchrun --standalone --nproc-per-node 2 examples/ownership.py

Two processes on a CPU take some seconds. With GPUs, one process each, it runs on them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import dmuown

VOCABULARY, LENGTH, WIDTH = 64, 32, 64

#: Matrices go to Muown on their owner. The two largest tensors are cut into shards, the rest is owned by somebody.
POLICY = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
        {"role": ["norm", "bias", "vector"], "set": {"route": "adamw"}},
    ],
}


class Block(nn.Module):
    """Attention and a gated MLP, as in a Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width], both ways."""
        normed = self.attention_norm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (4, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        hidden: Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return hidden


class Model(nn.Module):
    """Two blocks that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] tokens -> [batch, length, vocabulary] logits."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def batch(step: int, device: str) -> Tensor:
    """Sequences that count up by a stride of their own: something to learn without data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    stride = torch.randint(1, 5, (16, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH)) % VOCABULARY).to(device)


def main() -> None:
    """Dedicate, train, and gather the whole model once at the end."""
    parser = argparse.ArgumentParser(description="Muown under the ownership runtime.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches of a step")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    first = dist.get_rank() == 0

    torch.manual_seed(0)  # equal values on all ranks
    model = Model().to(device)
    plan = dmuown.dedicate_params(model, mesh, predicate=lambda name, param: param.requires_grad, param_policy=POLICY)
    optimizer = dmuown.Muown(model, lr=options.lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    summary = dmuown.summarize_param_groups(model, optimizer)
    if first:
        print(plan)
        print(summary)

    losses = []
    for step in range(options.steps):
        for part in range(options.accumulate):
            tokens = batch(options.accumulate * step + part, device)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / options.accumulate).backward()
        norm = dmuown.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if first and (step + 1) % 10 == 0:
            print(f"step {step + 1:3d}  loss {losses[-1]:.3f}  grad norm {norm.item():.2f}", flush=True)

    with dmuown.gathered(model):  # every rank holds the whole model in here
        size = sum(param.numel() for param in model.parameters())
    if first:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {size} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
