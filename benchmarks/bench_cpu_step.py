"""One Muown step on SmolLM2-135M's matrices on the processor, beside the published algorithm's per-parameter bf16 loop.

    OMP_NUM_THREADS=2 python benchmarks/bench_cpu_step.py --layers 6 --output cpu.json

The loop is written here from the equations (docs/primer/muown.md, without guards), one parameter after the other, as
the published reference runs them. Both step in turn, so that they share whatever else the machine does.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from harness import Report
from torch import Tensor
from torch.nn import Parameter

import dmuown

#: SmolLM2-135M: hidden 576, 9 heads and 3 key-value heads of 64, feed-forward 1536; 30 layers.
LAYER = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))


class Loop:
    """Muown with Nesterov momentum and no decay, one parameter at a time, Newton-Schulz in bf16."""

    def __init__(self, params: list[Parameter], lr: float = 3e-4) -> None:
        self.params, self.lr, self.taken = params, lr, 0
        norms = [param.detach().norm(dim=1, keepdim=True) for param in params]
        self.state = [
            [norm.clone(), norm.clone(), torch.zeros_like(param), torch.zeros_like(norm), torch.zeros_like(norm)]
            for param, norm in zip(params, norms, strict=True)
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        self.taken += 1
        for param, state in zip(self.params, self.state, strict=True):
            g, v_norm, momentum, first, second = state
            assert param.grad is not None
            unit = param / g
            dg = (param.grad * unit).sum(dim=1, keepdim=True)
            dv = (g / v_norm) * (param.grad - unit * dg)
            momentum.mul_(0.95).add_(dv)
            update = newton_schulz(dv.add(momentum, alpha=0.95))
            moved = (unit * v_norm).add(update, alpha=-self.lr * 0.2 * math.sqrt(max(param.shape)))
            first.mul_(0.9).add_(dg, alpha=0.1)
            second.mul_(0.95).addcmul_(dg, dg, value=0.05)
            corrected = (second / (1 - 0.95**self.taken)).sqrt().add_(1e-8)
            g.addcdiv_(first / (1 - 0.9**self.taken), corrected, value=-self.lr)
            v_norm.copy_(moved.norm(dim=1, keepdim=True))
            param.copy_(g * (moved / v_norm))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five quintic steps in bf16 on the wide orientation."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shapes = LAYER * arguments.layers
    values = [torch.randn(shape) * 0.02 for shape in shapes]
    gradients = [torch.randn(shape) for shape in shapes]

    def parameters() -> list[Parameter]:
        made = [Parameter(value.clone()) for value in values]
        for param, grad in zip(made, gradients, strict=True):
            param.grad = grad
        return made

    steps: dict[str, Callable[[], object]] = {
        "per-parameter loop, bf16": Loop(parameters()).step,
        "dmuown Muown": dmuown.Muown(parameters()).step,
        "dmuown Muown, fp32": dmuown.Muown(parameters(), ns_dtype=torch.float32).step,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(arguments.repeats + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if repeat:
                times[name].append((time.perf_counter() - begin) * 1e3)
    report = Report("cpu_step", torch.device("cpu"), path=arguments.output, layers=arguments.layers)
    loop = statistics.median(times["per-parameter loop, bf16"])
    for name, taken in times.items():
        median = statistics.median(taken)
        report.add(name=name, median_ms=median, low_ms=min(taken), of_the_loop=median / loop)
    report.write()


if __name__ == "__main__":
    main()
