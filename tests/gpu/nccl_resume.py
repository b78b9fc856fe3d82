"""Save on some ranks, go on with others; and a rank that dies in a step. Through NCCL, by torchrun:

torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_resume save folder
torchrun --standalone --nproc-per-node 1 -m tests.gpu.nccl_resume go-on folder     # equal, or a non-zero status
torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_resume die folder       # ends with an error, and soon
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuown

BEFORE, AFTER = 3, 2


class Model(nn.Module):
    """Three matrices of unlike shapes, and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(64, 200)
        self.middle = nn.Linear(200, 136)
        self.outward = nn.Linear(136, 64)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 64], both ways."""
        y: Tensor = self.outward(torch.tanh(self.middle(torch.tanh(self.inward(x)))))
        return y


def build() -> tuple[nn.Module, dmuown.NorMuown]:
    """The same weights whatever the number of ranks."""
    torch.manual_seed(0)
    model = Model().cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    return model, dmuown.NorMuown(dmuown.param_groups(model), lr=0.02, ns_dtype=torch.float32)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every rank, so that the mean gradient does not depend on their number."""
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    """Whole, on the host."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in model.parameters()]


def main() -> int:
    """Do one of the three; return how many weights differ."""
    phase, folder = sys.argv[1], Path(sys.argv[2])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=30))
    model, optimizer = build()
    differing = 0
    if phase == "go-on":
        extra = dmuown.load_checkpoint(str(folder / "saved"), model, optimizer)
        train(model, optimizer, range(extra["step"], extra["step"] + AFTER))
        expected = torch.load(folder / "expected.pt", weights_only=True)
        for name, one, other in zip(extra["names"], weights(model), expected, strict=True):
            error = float((one.double() - other.double()).norm() / other.double().norm())
            differing += not error < 2e-5
            print(f"{name}: {error:.1e}", flush=True)
    else:
        train(model, optimizer, range(BEFORE))
        if phase == "die":
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, range(BEFORE, BEFORE + 50))
        names = [name for name, _ in model.named_parameters()]
        dmuown.save_checkpoint(str(folder / "saved"), model, optimizer, extra={"step": BEFORE, "names": names})
        train(model, optimizer, range(BEFORE, BEFORE + AFTER))
        whole = weights(model)
        if dist.get_rank() == 0:
            torch.save(whole, folder / "expected.pt")
    dist.destroy_process_group()
    return differing


if __name__ == "__main__":
    sys.exit(min(main(), 1))
