"""Run in a process of its own, with or without a Dion on its path: train, save, resume, and print what base was used.

python -m tests.unit.checkpoint.dion_training THEIRS|SAVE|RESUME CLASS FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {"a": (6, 10), "b": (9, 4), "c": (5,), "d": (7,)}


def orthogonalize(x: Tensor, epsilon: Any = 1e-7) -> Tensor:
    """Newton-Schulz in fp32, given to both libraries: what is compared is everything around it.

    Rounds what it is given and what it returns to bf16, as either library may do around it: Dion's momentum always
    comes in bf16, ours in the compute dtype of the processor.
    """
    x = x.bfloat16().float()
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + float(epsilon))
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if transposed else x).bfloat16().float()


def model() -> nn.ParameterDict:
    torch.manual_seed(0)
    return nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})


def groups(params: nn.ParameterDict, algorithm: str) -> list[dict[str, Any]]:
    return [
        {"params": [params["a"], params["b"]], "algorithm": algorithm},
        {"params": [params["c"]], "algorithm": "adamw", "lr": 0.003},
        {"params": [params["d"]], "algorithm": "lion", "lr": 0.001},
    ]


def optimizer_of(package: Any, name: str, params: nn.ParameterDict) -> Any:
    options = {"lr": 0.02, "mu": 0.9, "weight_decay": 0.1, "nesterov": True, "newton_schulz_func": orthogonalize}
    return getattr(package, name)(groups(params, name.lower()), **options)


def train(params: nn.ParameterDict, optimizer: Any, steps: range) -> None:
    for step in steps:
        for index, name in enumerate(SHAPES):
            generator = torch.Generator().manual_seed(100 * step + index)
            params[name].grad = torch.randn(SHAPES[name], generator=generator)
        optimizer.step()


def main(mode: str, name: str, folder: Path) -> None:
    params = model()
    if mode == "THEIRS":
        import dion

        optimizer = optimizer_of(dion, name, params)
    else:
        import dmuown

        optimizer = optimizer_of(dmuown, name, params)
    if mode == "RESUME":
        saved = torch.load(folder / "saved.pt", weights_only=True)
        params.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        train(params, optimizer, range(3))
        torch.save({"model": params.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
    train(params, optimizer, range(3, 6))
    torch.save(params.state_dict(), folder / f"{mode}.pt")
    print(json.dumps([base.__module__ for base in type(optimizer).__mro__]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
