"""Does low-bit state cost loss? A tiny transformer learns Python's own documentation, by algorithm and state precision.

    OMP_NUM_THREADS=1 python benchmarks/bench_lowbit_lm.py --output lowbit.json

Characters of `pydoc_data.topics`, which ships with Python: the first nine tenths are learnt, the rest is the validation
text. Runs of one seed start from the same weights and see the same batches, so that they differ by the storage of
state alone. `state_precision` holds for all groups: the matrices' momentum, and both moments of AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from harness import Report
from torch import Tensor, nn
from torch.nn import functional

import dmuown

ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")
PRECISIONS = ("fp32", "bf16", "int8", "int4", "fp8")

#: Learning rate of the matrices: the best of 1x, 2x and 4x steps around the defaults, at fp32.
LEARNING_RATES = {"muon": 0.02, "normuon": 0.02, "muown": 0.02, "normuown": 0.12, "angular_muown": 0.04}

#: Rate of embeddings, norms and the head.
ADAMW_RATE = 3e-3


@dataclass(frozen=True)
class Size:
    """Model and schedule."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch: int = 16
    steps: int = 400


def corpus() -> tuple[Tensor, Tensor, int]:
    """Training and validation text as numbers of characters, and how many there are."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    known = sorted(set(text))
    data = torch.tensor([known.index(byte) for byte in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(known)


class Layer(nn.Module):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        hidden: Tensor = self.up(self.norm2(x)).relu().square()
        result: Tensor = x + self.down(hidden)
        return result


class Model(nn.Module):
    """A character model."""

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> logits."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def build(model: Model, algorithm: str, precision: str, rate: float) -> dmuown.Muon:
    """Matrices of the layers to the algorithm, all else to AdamW, all state in one precision."""
    matrices = [param for param in model.layers.parameters() if param.ndim == 2]
    chosen = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in chosen]
    # A fused q/k/v of three blocks. Blocks of 64 to 256 elements share a scale; layer norms are shorter and stay fp32.
    fused = [param for param in matrices if param.shape[0] == 3 * param.shape[1]]
    others = [param for param in matrices if param.shape[0] != 3 * param.shape[1]]
    width = fused[0].shape[1]
    return dmuown.Muon(
        [
            {"params": fused, "algorithm": algorithm, "split_sizes": (width,) * 3},
            {"params": others, "algorithm": algorithm},
            {"params": rest, "algorithm": "adamw", "lr": ADAMW_RATE},
        ],
        lr=rate,
        weight_decay=0.0,
        state_precision=precision,
    )


def train(algorithm: str, precision: str, seed: int, size: Size, rate: float | None = None) -> float:
    """Train one model, the learning rate falling linearly to zero, and return its loss on the validation text."""
    learnt, held_out, vocabulary = corpus()
    torch.manual_seed(seed)
    model = Model(size, vocabulary)
    optimizer = build(model, algorithm, precision, LEARNING_RATES[algorithm] if rate is None else rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / size.steps)
    offsets = torch.arange(size.context + 1)
    for _ in range(size.steps):
        starts = torch.randint(len(learnt) - size.context - 1, (size.batch, 1))
        window = learnt[starts + offsets]
        optimizer.zero_grad()
        functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    count = len(held_out) // (size.context + 1)
    windows = held_out[: count * (size.context + 1)].view(count, -1)[:512]
    with torch.no_grad():
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    return float(loss)


def compare(algorithm: str, precisions: tuple[str, ...], seeds: range, size: Size) -> dict[str, list[float]]:
    """Validation losses by precision, one a seed."""
    return {precision: [train(algorithm, precision, seed, size) for seed in seeds] for precision in precisions}


def main() -> None:
    """Print a row an algorithm and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    size = Size(steps=arguments.steps)
    text = f"Python {sys.version.split()[0]}"
    report = Report("low-bit tiny LM", torch.device("cpu"), path=arguments.output, text=text)
    for algorithm in arguments.algorithms.split(","):
        found = compare(algorithm, tuple(arguments.precisions.split(",")), range(arguments.seeds), size)
        base = found["fp32"]
        for precision, losses in found.items():
            ratios = [loss / exact - 1 for loss, exact in zip(losses, base, strict=True)]
            report.add(
                algorithm=algorithm,
                precision=precision,
                loss=statistics.mean(losses),
                percent=100 * (statistics.mean(losses) / statistics.mean(base) - 1),
                worst_percent=100 * max(ratios, key=abs),
            )


if __name__ == "__main__":
    main()
