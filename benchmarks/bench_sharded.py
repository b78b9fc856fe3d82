"""One optimizer step on several cards, FSDP2's Shard(0), beside torch's AdamW and Dion where it is importable.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_sharded.py --output sharded.json

Shapes and floor as `bench_step.py`; the floor's arithmetic is divided by the ranks. Times are the slowest rank's.
Bytes are what the plan says that this rank sends, and what the exchange counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_step import builders, dion, floor_ms, measure_captured, parameters, state_gib
from harness import Report, Timing, ceilings, chosen, measure, peak_memory
from shapes import LAYERS, LLAMA_1B_LAYERS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

import dmuown


def shard(params: list[Parameter], mesh: DeviceMesh) -> list[Parameter]:
    """The same parameters and gradients as DTensors, Shard(0)."""
    sharded = []
    for param in params:
        made = Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
        assert param.grad is not None
        made.grad = distribute_tensor(param.grad, mesh, [Shard(0)])
        sharded.append(made)
    return sharded


def slowest(timing: Timing, device: torch.device) -> Timing:
    """Per field, the largest over ranks."""
    values = torch.tensor([timing.median, timing.low, timing.high, timing.host], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return Timing(*values.tolist())


def main() -> None:
    """Run and report from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--only", default="", help="comma-separated parts of the names to run; =name is exact")
    parser.add_argument("--layers", type=int, default=LLAMA_1B_LAYERS)
    parser.add_argument("--widths", default="1b", choices=sorted(LAYERS), help="of Llama-1B or 8B")
    parser.add_argument("--graph", default="", help="also replay the step from a CUDA graph, on so many streams: 1,2,3")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world_size, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (world_size,))
    layers = arguments.layers if cuda else 1
    report = Report(
        "sharded",
        device,
        path=arguments.output if first else None,
        layers=layers,
        ranks=world_size,
        widths=arguments.widths,
    )
    found = {name: build for name, build in builders().items() if "batch_size" not in name}
    for name in [name for name in found if name.startswith("dion")]:
        kind, _, flag = name.removeprefix("dion ").partition(" ")
        option = {"triton": "use_triton", "gram": "use_gram_newton_schulz"}[flag]
        found[name] = dion(kind, distributed_mesh=mesh, **{option: True})
    wanted = [part for part in arguments.only.split(",") if part]
    for name, build in found.items():
        if wanted and not chosen(name, wanted):
            continue
        whole_matrices, whole_vectors = parameters(device, layers, torch.float32, arguments.widths)
        rates = ceilings(device)
        floor = floor_ms(whole_matrices, rates) / world_size
        matrices, vectors = shard(whole_matrices, mesh), shard(whole_vectors, mesh)
        del whole_matrices, whole_vectors
        try:
            optimizers = build(matrices, vectors)

            def step(optimizers: list[torch.optim.Optimizer] = optimizers) -> None:
                for optimizer in optimizers:
                    optimizer.step()

            for _ in range(3):
                step()
            timing = slowest(measure(step, device, repeats=10, seconds=1e9), device)
            memory = peak_memory(step, device)
        except Exception as reason:  # a peer that does not run here is a row of its own, not the end of the run
            if first:
                report.add(name=name, failed=f"{type(reason).__name__}: {reason}"[:200])
            continue
        sent = _sent(optimizers, step)
        if name.startswith("dmuown") and cuda:
            for key, value in measure_captured(optimizers[0], device, arguments.graph, floor).items():
                sent[key] = slowest(value, device) if isinstance(value, Timing) else value
        if first:
            report.add(
                name=name,
                step=timing,
                floor_ms=floor,
                ratio=timing.median / floor,
                temporary_gib=memory,
                state_gib=state_gib(optimizers),
                peak_tflops=rates.matmul_tflops,
                copy_tbps=rates.copy_tbps,
                **sent,
            )
        assert isinstance(matrices[0], DTensor)
        del optimizers, matrices, vectors
    if first:
        report.write()
    dist.destroy_process_group()


def _sent(optimizers: list[torch.optim.Optimizer], step: Callable[[], None]) -> dict[str, Any]:
    """Collectives and bytes of one more step, as our exchange counts them."""
    optimizer = optimizers[0]
    if not isinstance(optimizer, dmuown.Muon | dmuown.Muown | dmuown.AngularMuown):
        return {}
    before = optimizer.exchange_count.bytes_sent, optimizer.exchange_count.all_to_alls
    step()
    after = optimizer.exchange_count
    return {"bytes_sent": after.bytes_sent - before[0], "all_to_alls": after.all_to_alls - before[1]}


if __name__ == "__main__":
    main()
