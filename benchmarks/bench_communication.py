"""Bytes and collectives of a training step: the ownership runtime beside its plan and beside FSDP2, the same algorithm.

    python benchmarks/bench_communication.py --ranks 4

Gloo ranks of this machine; counted where torch calls its process groups (`TrafficCounter`), independently of both.
Buffers in MB: a collective's whole buffer. With `--pairs` also what the kernel says went over each connection between
the two halves of the ranks, as if each half were a node.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import dmuown
from dmuown.diagnostics.traffic import TrafficCounter

WIDTH, HIDDEN, VOCABULARY, LAYERS = 256, 704, 4096, 6
POLICY: dict[str, Any] = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
        {"role": ["norm", "bias"], "set": {"route": "adamw"}},
    ],
}


class Block(nn.Module):
    """The parameters of a Llama layer: four projections of attention, three of the MLP, two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 4, bias=False), nn.Linear(WIDTH, WIDTH // 4, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the projections; what they compute does not matter here."""
        y = self.input_norm(x)
        x = x + self.o(self.q(y) * (self.k(y) + self.v(y)).repeat(1, 1, 4))
        y = self.post_norm(x)
        update: Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + update


class Model(nn.Module):
    """A small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens.flatten())


def _build(kind: str, shape: tuple[int, ...], reshard: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Model()
    if kind == "dedicated":
        plan = dmuown.dedicate_params(
            model,
            mesh,
            predicate=lambda name, param: param.requires_grad,
            param_policy=POLICY,
            reshard_after_forward=reshard,
        )
        return model, dmuown.Muown(model, lr=1e-3), plan
    for module in (*model.layers, model.embed_tokens, model.norm, model.lm_head):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model, dmuown.Muown(dmuown.param_groups(model, POLICY), lr=1e-3), None


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _connections() -> dict[tuple[int, int], int]:
    """Bytes sent so far over every TCP connection of this process, by local and remote port."""
    text = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    found: dict[tuple[int, int], int] = {}
    for line, details in zip(text.splitlines()[::2], text.splitlines()[1::2], strict=False):
        if f"pid={os.getpid()}," not in line:
            continue
        local, remote = line.split()[3:5]
        sent = re.search(r"bytes_sent:(\d+)", details)
        found[int(local.rsplit(":", 1)[1]), int(remote.rsplit(":", 1)[1])] = int(sent.group(1)) if sent else 0
    return found


def _between_halves(before: dict[tuple[int, int], int], after: dict[tuple[int, int], int]) -> tuple[int, int]:
    """Bytes sent within and between the two halves of the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {ports: size - before.get(ports, 0) for ports, size in after.items()}
    everyone: list[dict[tuple[int, int], int]] = [{}] * ranks
    dist.all_gather_object(everyone, mine)
    owner = {ports[0]: each for each in range(ranks) for ports in everyone[each]}
    within = between = 0
    for (_, remote), size in mine.items():
        if remote in owner:
            same = owner[remote] // (ranks // 2) == rank // (ranks // 2)
            within, between = within + size * same, between + size * (not same)
    total = torch.tensor([within, between])
    dist.all_reduce(total)
    return int(total[0]), int(total[1])


def _compare(shape: tuple[int, ...], reshard: bool, pairs: bool) -> None:
    first = dist.get_rank() == 0
    elements = sum(param.numel() for param in Model().parameters())
    for kind in ("dedicated", "FSDP2"):
        model, optimizer, plan = _build(kind, shape, reshard)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):  # FSDP2 sets up in its first step
            tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
            before = _connections() if pairs else {}
            with TrafficCounter() as passes:
                model(tokens).backward()
            dist.barrier()
            middle = _connections() if pairs else {}
            with TrafficCounter() as stepping:
                optimizer.step()
            dist.barrier()
            after = _connections() if pairs else {}
            optimizer.zero_grad()
        sent = [_between_halves(*each) for each in ((before, middle), (middle, after))] if pairs else []
        if not first:
            continue
        label = f"{kind}, {'x'.join(map(str, shape))}, {'given up' if reshard else 'kept'} after forward"
        moved = ", ".join(f"{count} {name} {_mb(size)}" for name, (count, size) in sorted(passes.kinds.items()))
        print(f"{label}: passes {passes.collectives} collectives {_mb(passes.bytes)} MB ({moved})")
        print(f"  = {passes.bytes / elements / 4:.3f} x parameters; step {stepping.collectives}, {stepping.bytes} B")
        if plan is not None:
            planned = plan.per_step(rank=dist.get_rank())
            collectives = sum(total["collectives"] for total in planned.values())
            size = sum(total["bytes"] for total in planned.values())
            print(f"  plan: {collectives} collectives, {size} B; counted without host messages: ", end="")
            print(passes.bytes - passes.kinds["all_reduce"][1], "B")
        for what, halves in zip(("passes", "step"), sent, strict=False):
            print(f"  {what}, sent by all ranks: {_mb(halves[0])} MB within halves, {_mb(halves[1])} MB between")


def _rank(rank: int, ranks: int, store: str, pairs: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=10)
    )
    shapes: list[tuple[int, ...]] = [(ranks,)]
    if ranks % 2 == 0 and ranks > 2:
        shapes.append((2, ranks // 2))
    for shape in shapes:
        for reshard in (True, False):
            _compare(shape, reshard, pairs)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", action="store_true", help="bytes between the halves of the ranks, by `ss` (Linux)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (arguments.ranks, f"{folder}/store", arguments.pairs), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
