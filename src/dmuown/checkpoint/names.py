"""Canonical names of a model's parameters: what its own definition calls them, whatever wraps it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from dmuown.errors import ParameterError
from dmuown.policy.names import without_wrappers


def canonical_fqn(model: nn.Module, name: str) -> str:
    """Return a parameter's or buffer's name without what wrappers inserted.

    `_orig_mod` (torch.compile), `_checkpoint_wrapped_module` and `_fsdp_wrapped_module` are dropped
    wherever they occur, `module` only below DistributedDataParallel and DataParallel: models may
    have a submodule of that name.

    Args:
        model: The model.
        name: As in `model.named_parameters()`.
    """
    kept = []
    module: nn.Module | None = model
    for part in name.split("."):
        if not (part == "module" and isinstance(module, (DistributedDataParallel, DataParallel))):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return without_wrappers(".".join(kept))


def parameter_fqns(model: nn.Module) -> dict[Tensor, str]:
    """Return every parameter's canonical name; a shared one goes by its first name."""
    return {param: canonical_fqn(model, name) for name, param in model.named_parameters()}


def as_optimizers(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return a list of optimizers, whether one or several were passed; a generator's once."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def optimizer_fqns(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the canonical names of an optimizer's parameters, group by group.

    Raises:
        ParameterError: A parameter that the model does not have.
    """
    fqns = parameter_fqns(model)
    named = []
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param group {index}, parameter {i}" for i in range(len(group["params"]))]
        for name, param in zip(names, group["params"], strict=True):
            if param not in fqns:
                raise ParameterError(name, "is in the optimizer and not in the model", "Pass the model it belongs to")
        named.append([fqns[param] for param in group["params"]])
    return named
