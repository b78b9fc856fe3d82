"""A whole training step of a 1B Llama: what an optimizer, or the ownership runtime, adds to FSDP2 and fused AdamW.

    python benchmarks/bench_training_step.py
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_training_step.py

Llama-1B widths, 16 layers, vocabulary 32,000; bf16 compute over fp32 parameters; 8 micro-batches of 2 x 4096 tokens a
step (65,536) on every rank. All variants are resident and take steps in turn; times are the slowest rank's. On CPU a
model of a hundredth of the width, two micro-batches of 2 x 64.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, chosen, default_device, measure
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


#: So small that weights stay as they are: all variants multiply the same numbers, which decide how much power a card
#: draws and so how fast it runs.
LR = 1e-12


def make_model(shape: Shape, device: torch.device, mesh: DeviceMesh | None, runtime: str) -> nn.Module:
    """The model under FSDP2 or an ownership runtime, fp32 parameters, bf16 compute."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(shape)
    if mesh is None:
        return model
    if runtime == "dmuown":
        routes: dict[str, Any] = {
            "defaults": {"route": "muon", "param_dtype": "bfloat16", "grad_dtype": "float32"},
            "overrides": [
                {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
                {"role": ["norm", "bias"], "set": {"route": "adamw"}},
            ],
        }
        dmuown.dedicate_params(model, mesh, predicate=lambda name, param: True, param_policy=routes)
        return model
    if runtime == "dmuon":
        import dmuon

        dmuon.dedicate_params(
            model, mesh, lambda name, param: "blocks" in name and param.ndim == 2, compute_dtype=torch.bfloat16
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else)."""
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    chosen = set(matrices)
    return matrices, [p for p in model.parameters() if p not in chosen]


@dataclass(frozen=True)
class Variant:
    """What makes an object with `step` and `zero_grad` for a model."""

    make: Callable[[nn.Module], Any]
    runtime: str = "fsdp2"


def _adamw(model: nn.Module) -> Any:
    cuda = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=cuda)


def _ours(kind: str, capture: bool = False, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        matrices, rest = split(model)
        groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "weight_decay": 0.1}]
        optimizer = getattr(dmuown, kind)(groups, lr=LR, **options)
        return dmuown.capture(optimizer) if capture else optimizer

    return make


def _dedicated(kind: str, capture: bool = False) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        optimizer = getattr(dmuown, kind)(model, lr=LR)
        return dmuown.capture(optimizer) if capture else optimizer

    return make


def _dion(mesh: DeviceMesh | None, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        import dion

        matrices, rest = split(model)
        groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "weight_decay": 0.1}]
        return dion.Muon(groups, distributed_mesh=mesh, lr=LR, **options)

    return make


def _published(model: nn.Module) -> Any:
    import dmuon

    return dmuon.Muon(model, lr=LR, ns_steps=5, adamw_lr=LR)


def variants(mesh: DeviceMesh | None) -> dict[str, Variant]:
    """By name, everything that can be measured here."""
    found = {
        "torch AdamW fused": Variant(_adamw),
        "dmuown Muown": Variant(_ours("Muown")),
        "dmuown Muown dedicated": Variant(_dedicated("Muown"), runtime="dmuown"),
        "dmuown Muown captured": Variant(_ours("Muown", capture=True)),
        "dmuown Muown dedicated captured": Variant(_dedicated("Muown", capture=True), runtime="dmuown"),
        "dmuown Muon keller captured": Variant(
            _ours("Muon", capture=True, scheme="newton_schulz", coefficients="keller")
        ),
        "dmuown NorMuon captured": Variant(_ours("NorMuon", capture=True)),
    }
    if importlib.util.find_spec("dion"):
        found["dion Muon triton"] = Variant(_dion(mesh, use_triton=True))
    if importlib.util.find_spec("gram_newton_schulz"):
        found["dion Muon gram"] = Variant(_dion(mesh, use_gram_newton_schulz=True))
    if importlib.util.find_spec("dmuon"):  # the last: importing it patches FSDP2
        found["dmuon 0.2 Muon"] = Variant(_published, runtime="dmuon")
    return found


class Run:
    """One variant, resident: its model, its optimizer, and what was measured of it."""

    def __init__(self, name: str, variant: Variant, shape: Shape, device: torch.device, mesh: DeviceMesh | None):
        before = _allocated(device)
        self.name, self.device = name, device
        self.model = make_model(shape, device, mesh, variant.runtime)
        self.optimizer = variant.make(self.model)
        self.before = before
        self.times: list[float] = []
        self.losses: list[Tensor] = []
        self.peak = 0.0

    def backward(self, tokens: Tensor) -> Tensor:
        """Accumulate the gradients of all micro-batches; the mean loss."""
        total = torch.zeros((), device=self.device)
        for batch in tokens:
            loss = self.model(batch) / len(tokens)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, tokens: Tensor) -> None:
        """One training step."""
        loss = self.backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)

    def settle(self, tokens: Tensor) -> None:
        """Steps that compile, fill caches and record; what stays allocated afterwards is this variant's own."""
        for _ in range(4):
            self.step(tokens)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.own = _allocated(self.device) - self.before

    def timed(self, tokens: Tensor) -> None:
        """One more step, timed."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            start = torch.cuda.memory_allocated(self.device)
        timing = measure(lambda: self.step(tokens), self.device, warmup=0, repeats=1, least=1)
        self.times.append(timing.median)
        if self.device.type == "cuda":
            transient = (torch.cuda.max_memory_allocated(self.device) - start) / 2**30
            self.peak = max(self.peak, self.own + transient)


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _any(here: bool, device: torch.device) -> bool:
    return bool(_slowest([float(here)], device)[0])


def _slowest(times: list[float], device: torch.device) -> list[float]:
    values = torch.tensor(times, device=device)
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument(
        "--only", default="", help="comma-separated parts of the names to run; =name is exact; the base always runs"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = default_device()
    shape = Shape() if device.type == "cuda" else SMALL
    mesh = None
    if device.type == "cuda":
        if "RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            method = f"file://{tempfile.mkdtemp()}/store"
            device = torch.device("cuda", torch.cuda.current_device())
            dist.init_process_group("nccl", init_method=method, rank=0, world_size=1, device_id=device)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    report = Report("training_step", device, path=None if rank else arguments.output, shape=vars(shape), ranks=ranks)
    wanted = [part for part in arguments.only.split(",") if part]
    generator = torch.Generator(device=device).manual_seed(1 + rank)
    size = (shape.micro_batches, shape.batch, shape.sequence + 1)
    tokens = torch.randint(shape.vocabulary, size, device=device, generator=generator)
    runs: list[Run] = []
    for name, variant in variants(mesh).items():
        if runs and wanted and not chosen(name, wanted):
            continue
        if (variant.runtime == "dmuown" or "captured" in name) and device.type != "cuda":
            continue
        try:
            run = Run(name, variant, shape, device, mesh)
            run.settle(tokens)
            failed = ""
        except Exception as reason:  # a peer that does not run here is a row of its own, not the end of the run
            failed = f"{type(reason).__name__}: {reason}"[:200]
        if _any(bool(failed), device):
            report.add(name=name, failed=failed or "on another rank")
        else:
            runs.append(run)
    # In turn, since a card's clock falls as it warms: all meet the same.
    for turn in range(arguments.repeats):
        for run in runs[turn % len(runs) :] + runs[: turn % len(runs)]:
            run.timed(tokens)
    base: list[float] = []
    for run in runs:
        times = _slowest(run.times, device)
        base = base or times
        run.backward(tokens)
        alone = measure(run.optimizer.step, device, warmup=1, repeats=5)
        if rank:
            continue
        report.add(
            name=run.name,
            step_ms=statistics.median(times),
            times=times,
            over_adamw=statistics.median(times) / statistics.median(base) - 1,
            optimizer=alone,
            peak_gib=run.peak,
            own_gib=run.own,
            first_loss=float(run.losses[0]),
            last_loss=float(run.losses[-1]),
        )
    for run in runs:
        if "captured" in run.name:
            run.optimizer.release()
    report.write()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
