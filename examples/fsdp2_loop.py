"""Train a small transformer with Muown in a plain FSDP2 loop, save it, and resume.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_loop.py

Two processes on a CPU take some seconds. With GPUs, one process each, it runs on them.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuown

VOCABULARY, LENGTH, WIDTH = 64, 32, 64

#: Matrices go to Muown; AdamW takes what is looked up, what makes logits, and what is a vector.
POLICY = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
        {"role": ["norm", "bias", "vector"], "set": {"route": "adamw"}},
    ],
}


class Model(nn.Module):
    """Two layers that predict the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] tokens -> [batch, length, vocabulary] logits."""
        hidden = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def batch(step: int, device: str) -> Tensor:
    """Sequences that count up by a stride of their own: something to learn without data."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    stride = torch.randint(1, 5, (16, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH)) % VOCABULARY).to(device)


def build(mesh: DeviceMesh, lr: float) -> tuple[nn.Module, dmuown.Muown]:
    """A sharded model, and its optimizer."""
    torch.manual_seed(0)
    model = Model().to(mesh.device_type)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # q, k and v of an attention layer are one tensor here, and three matrices for Muown.
    groups = dmuown.param_groups(model, POLICY, auto_split=True)
    return model, dmuown.Muown(groups, lr=lr)


def train(model: nn.Module, optimizer: dmuown.Muown, steps: range) -> list[float]:
    """Take the steps; return the loss of each, averaged over ranks."""
    losses = []
    for step in steps:
        tokens = batch(step, next(model.parameters()).device.type)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(
                f"step {step + 1:3d}  loss {losses[-1]:.3f}  grad norm {norm.item():.2f}  "
                f"orthogonalized {optimizer.orthogonalized}",
                flush=True,
            )
    return losses


def main() -> None:
    """Train, save, resume, and compare."""
    parser = argparse.ArgumentParser(description="Muown in a plain FSDP2 loop.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    model, optimizer = build(mesh, options.lr)
    if dist.get_rank() == 0:
        for group in optimizer.param_groups:
            print(f"{group['algorithm']:6s} {', '.join(group['param_names'])}")
    losses = train(model, optimizer, range(options.steps))

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dmuown.save_checkpoint(folder[0], model, optimizer, extra={"step": options.steps})
    more = train(model, optimizer, range(options.steps, options.steps + 5))

    other_model, other_optimizer = build(mesh, options.lr)
    step = dmuown.load_checkpoint(folder[0], other_model, other_optimizer)["step"]
    again = train(other_model, other_optimizer, range(step, step + 5))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; resumed exactly: {more == again}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
