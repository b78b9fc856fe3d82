"""The ownership runtime in the host: a parallelizer that shards nothing, clipping, checkpoints.

The host's recipe builds the model, then the optimizer. While it builds the model, a parallelizer stands in that
applies all but FSDP2 (activation checkpointing, compilation), so that every rank loads whole parameters;
`DMuonConfig.build` then gives each an owner. From there on the runtime's hooks move parameters and gradients.

Hooks of the host, and what for:

- `ModelParallelizer._fully_shard_module`, subclassed: leaves modules as they are, and notes the mixed precision.
- `model_parallelizer._DEFAULT_PARALLELIZER`, replaced while the model is built: the host has no other hook for models
  without a parallelizer of their own. This is the one patch; it is undone before training starts.
- The recipe's `max_grad_norm`, None, and a step hook of the optimizer: the true norm over owners.
- `save_model`, `load_model`, `save_optimizer`, `load_optimizer` of the recipe's checkpointer, wrapped on that object:
  whole weights out and in, exact state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmuown.automodel.dmuon_options import DMuonOptions
from dmuown.automodel.grouping import build_param_groups
from dmuown.automodel.host import require_host
from dmuown.errors import OptionError
from dmuown.policy.schema import ParamPolicy, PolicyFields

#: Sizes that must be 1, and why.
_REFUSED = {
    "pp_size": "the runtime moves parameters in one model's forward and backward, and a stage's schedule has several "
    "under way at once",
    "ep_size": "an expert lies on the ranks of one expert group alone, and the runtime's owners are those of all "
    "data-parallel ranks",
    "cp_size": "the two have not been tried together, as torch's context parallelism has no CPU kernels to test on",
}


_INSTEAD = "Use another configuration of dmuown.automodel, such as MuownConfig: it steps sharded parameters"


def refusals(distributed: Mapping[str, Any] | None) -> list[OptionError]:
    """Every key of the section `distributed` that the runtime is not wired into the host for, why, and what to use.

    Tensor parallelism and replicas are taken.
    """
    section = distributed or {}
    found = [
        OptionError(f"distributed.{name}", f"must be 1 under DMuonConfig, got {section[name]}: {reason}", _INSTEAD)
        for name, reason in _REFUSED.items()
        if (section.get(name) or 1) != 1
    ]
    if section.get("strategy", "fsdp2") != "fsdp2":
        rule = f"must be fsdp2 under DMuonConfig, got {section['strategy']!r}"
        found.append(OptionError("distributed.strategy", rule, "Write fsdp2"))
    return found


def check_sizes(distributed: Mapping[str, Any] | None) -> None:
    """Refuse what `refusals` names, all of it at once.

    Raises:
        OptionError: What is refused, why, and what to use.
    """
    found = refusals(distributed)
    if len(found) == 1:
        raise found[0]
    if found:
        told = "; ".join(f"{error.subject.removeprefix('distributed.')} {error.rule}" for error in found)
        raise OptionError("distributed", told, _INSTEAD)


@contextlib.contextmanager
def whole_parameters(options: DMuonOptions) -> Iterator[None]:
    """Let the host build models without sharding them; notes their mixed precision in `options`.

    Raises:
        MissingDependencyError: The host is of another version than this replacement was written for.
    """
    require_host()
    from nemo_automodel.components.distributed import model_parallelizer
    from nemo_automodel.components.distributed.parallelizer import ModelParallelizer

    class Unsharded(ModelParallelizer):
        """Everything of the host's default but the sharding."""

        def _fully_shard_module(self, module: nn.Module, **kwargs: Any) -> nn.Module:
            policy = kwargs.get("mp_policy")
            if policy is not None:
                options.mixed_precision = (policy.param_dtype, policy.reduce_dtype)
            return module

    before = model_parallelizer._DEFAULT_PARALLELIZER
    model_parallelizer._DEFAULT_PARALLELIZER = Unsharded()
    try:
        yield
    finally:
        model_parallelizer._DEFAULT_PARALLELIZER = before


def build_owned(
    options: DMuonOptions, model: nn.Module, device_mesh: DeviceMesh | None = None
) -> list[torch.optim.Optimizer]:
    """Dedicate a model's parameters and build its optimizer.

    Args:
        options: The configuration.
        model: Parameters that are whole, equal on all ranks, or cut by tensor parallelism alone.
        device_mesh: The host's mesh; its data-parallel ranks are the owners. None: all ranks are.

    Raises:
        OptionError: The model is cut into parts, or already sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    from dmuown.ownership import dedicate_params
    from dmuown.ownership.groups import dedicated_param_groups

    if hasattr(model, "parts"):
        raise OptionError("distributed.pp_size", "must be 1 under DMuonConfig", "Use another configuration")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        if getattr(type(model), "parallelizer", None) is not None:
            raise OptionError(
                "model",
                f"has a parallelizer of its own in the host, {type(model).__name__}.parallelizer, which shards it",
                "Set model.force_hf: true, or use another configuration of dmuown.automodel, such as MuownConfig",
            )
        raise OptionError(
            "recipe",
            "has sharded the model before DMuonConfig could dedicate it",
            "Use dmuown finetune, or recipe: dmuown.automodel.recipe.FinetuneRecipe",
        )
    policy = policy_with_precision(options)
    dedicate_params(
        model,
        owner_mesh(device_mesh, next(model.parameters()).device.type),
        predicate=lambda name, parameter: True,
        hook_boundary_predicate=adapter_boundaries(model),
        param_policy=policy,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
    )
    (groups,) = build_param_groups([model], options.grouping_rules())
    split = dedicated_param_groups(model, groups, algorithm=options.algorithm)
    return [options.optimizer_class()(split, **options.optimizer_options())]


def owner_mesh(device_mesh: DeviceMesh | None, device: str) -> DeviceMesh:
    """Return the mesh that FSDP2 would shard over, replicas included: the ranks that hold the same parameters."""
    from nemo_automodel.components.distributed.mesh_utils import get_fsdp_dp_mesh

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if device_mesh is None or device_mesh.size() == 1:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("dmuown_owner",))
    mesh: DeviceMesh = get_fsdp_dp_mesh(device_mesh)
    return mesh


def adapter_boundaries(model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Choose hook boundaries for a model with LoRA adapters; None, the runtime's own choice, for one without.

    The host's adapted layer reads the weights of its `lora_A` and `lora_B` without calling them, so that outside of
    repeated blocks, as in an output head, the layer is the boundary and not they.
    """
    adapted = {
        id(child)
        for module in model.modules()
        if hasattr(module, "lora_A") and hasattr(module, "lora_B")
        for child in module.children()
    }
    if not adapted:
        return None
    elements = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    inside = {id(module) for element in model.modules() if id(element) in elements for module in element.modules()}
    chosen = elements | {id(module) for module in model.modules() if id(module) not in adapted | inside}
    return lambda module: id(module) in chosen and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def policy_with_precision(options: DMuonOptions) -> ParamPolicy:
    """The policy, with the host's mixed precision where it leaves `param_dtype` and `grad_dtype` open."""
    policy = options.routes()
    compute, reduce = options.mixed_precision
    fields = {"param_dtype": compute, "grad_dtype": reduce}
    given = policy.defaults.given()
    merged = {**{key: value for key, value in fields.items() if value is not None}, **given}
    return ParamPolicy(defaults=PolicyFields(**merged), overrides=policy.overrides)


def wrap_checkpointer(checkpointer: Any, model: nn.Module) -> None:
    """Let the host's checkpointer save and load a dedicated model: whole weights, and our own exact state.

    `model/` holds whole weights as without the runtime, consolidated export included. `optim/` holds what
    `dmuown.checkpoint.save_checkpoint` writes: owners' weights in their master dtype and optimizer state, each
    rank's its own; and the state of the host's schedulers.
    """
    from dmuown.checkpoint import load_checkpoint, save_checkpoint
    from dmuown.ownership import gathered

    save_model, load_model = checkpointer.save_model, checkpointer.load_model

    def save_whole(*args: Any, **kwargs: Any) -> Any:
        with gathered(model):
            return save_model(*args, **kwargs)

    def load_whole(*args: Any, **kwargs: Any) -> Any:
        with gathered(model, writeback=True):
            return load_model(*args, **kwargs)

    def save_state(optimizer: Any, model_: Any, path: str, scheduler: Any = None, **kwargs: Any) -> None:
        extra = {"schedulers": [entry.state_dict() for entry in _listed(scheduler)]}
        save_checkpoint(Path(path) / "optim", model, optimizer, extra=extra)

    def load_state(optimizer: Any, model_: Any, path: str, scheduler: Any = None, **kwargs: Any) -> None:
        extra = load_checkpoint(Path(path) / "optim", model, optimizer)
        for entry, state in zip(_listed(scheduler), extra.get("schedulers", []), strict=True):
            entry.load_state_dict(state)

    checkpointer.save_model, checkpointer.load_model = save_whole, load_whole
    checkpointer.save_optimizer, checkpointer.load_optimizer = save_state, load_state


def sum_over_owners(count: int, model: nn.Module) -> int:
    """Return the sum of what each owner of a dedicated model counts. Collective.

    Tensor-parallel ranks step the parts of the same matrices: each of them has owners, and their sum, of its own.
    """
    from dmuown.ownership import runtime_of

    link = runtime_of(model).link
    total = torch.tensor(count, device=next(model.parameters()).device)
    if link.group is not None:
        dist.all_reduce(total, group=link.group)
    return int(total)


def clip_before_step(optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float) -> list[torch.Tensor]:
    """Clip by the true global norm just before each step; returns a list that holds the last norm."""
    from dmuown.ownership import clip_grad_norm_

    last: list[torch.Tensor] = []

    def clip(*unused: Any) -> None:
        last[:] = [clip_grad_norm_(model, max_norm)]

    optimizer.register_step_pre_hook(clip)
    return last


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
