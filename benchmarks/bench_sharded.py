"""One optimizer step on sharded parameters: torchrun --nproc-per-node N benchmarks/bench_sharded.py

Every rank measures; rank 0 reports the slowest rank's median. FSDP2's layout: Shard(0) of every parameter over all
ranks. NCCL on CUDA, gloo with small shapes on CPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from bench_step import small_layer
from harness import Report, default_device, measure, peak_memory
from shapes import LLAMA_1B_LAYER, LLAMA_1B_LAYERS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuown


def parameters(device: torch.device, layers: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, vectors), sharded along their first axis, with gradients."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layer = LLAMA_1B_LAYER if device.type == "cuda" else small_layer()
    generator = torch.Generator(device=device).manual_seed(0)

    def one(*shape: int) -> nn.Parameter:
        def sharded() -> DTensor:
            return distribute_tensor(torch.randn(*shape, device=device, generator=generator), mesh, [Shard(0)])

        parameter = nn.Parameter(sharded())
        parameter.grad = sharded()
        return parameter

    matrices = [one(*shape) for _ in range(layers) for shape in layer.values()]
    return matrices, [one(next(iter(layer.values()))[1]) for _ in range(layers)]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--layers", type=int, default=LLAMA_1B_LAYERS)
    arguments = parser.parse_args()
    device = default_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
    layers = arguments.layers if device.type == "cuda" else 1
    report = Report("sharded", device, path=arguments.output, ranks=dist.get_world_size()) if rank == 0 else None
    kinds: dict[str, Any] = {
        "torch AdamW": None,
        "dmuown Muown": dmuown.Muown,
        "dmuown Muon": dmuown.Muon,
        "dmuown NorMuon": dmuown.NorMuon,
    }
    for name, kind in kinds.items():
        matrices, vectors = parameters(device, layers)
        if kind is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                [*matrices, *vectors], lr=1e-3, fused=device.type == "cuda"
            )
        else:
            optimizer = kind([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=1e-3)
        timing = measure(optimizer.step, device, repeats=10, seconds=60.0)
        slowest = torch.tensor([timing.median, timing.host, peak_memory(optimizer.step, device)], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if report is not None:
            median, host, memory = slowest.tolist()
            sent = getattr(optimizer, "exchange_count", None)
            report.add(
                name=name,
                step_ms=median,
                host_ms=host,
                temporary_gib=memory,
                sent_mib_a_step=0.0
                if sent is None
                else sent.bytes_sent / 2**20 / max(1, optimizer.param_groups[0]["step"]),
            )
        del optimizer, matrices, vectors
    if report is not None:
        report.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
