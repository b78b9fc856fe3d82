"""The optimizers users build. Each defaults its matrix groups to its own algorithm.

Any of them can hold groups of any algorithm: a group's `algorithm` key decides, and `"muon"` means
Muon in all of them. Everything after `params` is keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuown.engine.gradients import NonFinite
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import OptionError, OptionTypeError


class Muon(MuonEngine):
    """Muon: orthogonalized momentum (kellerjordan.github.io/posts/muon), with Dion's arguments and defaults.

    Args:
        params: Tensors, groups, a generator, or `(name, tensor)` pairs. Matrix parameters have global
            shape `[..., output, input]`; leading axes are independent matrices. Floating dtypes;
            DTensors of any Shard or Replicate placements, or plain tensors.
        distributed_mesh: Type-checked and otherwise unused: collectives follow each parameter's mesh.
        lr: Learning rate; scaled by `adjust_lr` for matrices.
        mu: Momentum factor in [0, 1).
        betas: Adam's and Lion's coefficients, for their groups.
        weight_decay: Decoupled decay, times the unscaled learning rate.
        cautious_wd: Decay only where update and weight have the same sign (arXiv 2510.12402).
        epsilon: Stabilizer of the orthogonalization's norm, and of Adam.
        nesterov: Look ahead along the momentum.
        adjust_lr: `"spectral_norm"` sqrt(m/n), `"rms_norm"` 0.2 sqrt(max(m, n)), `"keller"` sqrt(max(1, m/n)) or None.
        flatten: Treat parameters of 3 and more axes as one matrix `[first, rest]` (convolutions).
        use_triton: Require Triton; buckets that its row kernels do not cover are logged once and keep torch.
        use_polar_express: Polar Express coefficients (arXiv 2505.16932), `polar_express_1.02` as in Dion; False takes
            Jiacheng You's. Only where no `scheme` is given.
        use_gram_newton_schulz: Iterate on the Gram matrix, with `polar_express_1.05` as in Dion. Only where no
            `scheme` is given.
        newton_schulz_func: `func(x, epsilon=...) -> Tensor`; replaces the orthogonalizer.
        momentum_form: `"sum"` M <- mu M + G, or `"ema"` as torch.optim.Muon keeps it.
        scheme, coefficients, ns_steps, ns_epsilon, ns_norm, backend: The orthogonalizer; see
            `dmuown.orthogonalize.Orthogonalizer`. None leaves the choice to the arguments above.
        ns_dtype: Dtype of the orthogonalization. `"auto"`: float16 on CUDA, nearer than bfloat16 at the same speed
            (bfloat16 with `ns_form="plain"` or an own function); bfloat16 on a CPU that multiplies it fast; else
            float32. A torch dtype or its name, such as `"bfloat16"`, forces that one.
        batch_size: At most so many matrices at once; bounds temporary memory.
        maximize: Ascend.
        nonfinite: `"propagate"`, `"skip"` or `"raise"`; see `MuonEngine`.
        group_defaults: Any other group key, such as `capturable`, `foreach` or `state_precision`, for every group.
        partial: Whether other optimizers step dedicated parameters that are left out here; False refuses that.

    Raises:
        OptionError, ParameterError, LayoutError: A bad option or parameter, before any allocation.
    """

    def __init__(
        self,
        params: Any,
        *,
        distributed_mesh: DeviceMesh | ProcessGroup | None = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_triton: bool = False,
        use_polar_express: bool = True,
        use_gram_newton_schulz: bool = False,
        newton_schulz_func: Callable[..., Tensor] | None = None,
        momentum_form: str = "sum",
        scheme: str | None = None,
        coefficients: Any = None,
        ns_steps: int = 5,
        ns_epsilon: float | None = None,
        ns_dtype: Any = "auto",
        ns_norm: str = "add",
        backend: str = "auto",
        batch_size: int | None = None,
        maximize: bool = False,
        nonfinite: NonFinite = "propagate",
        **group_defaults: Any,
    ) -> None:
        if scheme is None and group_defaults.get("orthogonalization_strategy") is None:
            scheme, coefficients = _dion_scheme(use_polar_express, use_gram_newton_schulz, coefficients)
        super().__init__(
            params,
            distributed_mesh=distributed_mesh,
            newton_schulz_func=newton_schulz_func,
            nonfinite=nonfinite,
            defaults={
                "algorithm": self._algorithm,
                "lr": lr,
                "mu": mu,
                "betas": betas,
                "weight_decay": weight_decay,
                "cautious_wd": cautious_wd,
                "epsilon": epsilon,
                "nesterov": nesterov,
                "adjust_lr": "none" if adjust_lr is None else adjust_lr,
                "flatten": flatten,
                "use_triton": use_triton,
                "momentum_form": momentum_form,
                "scheme": scheme,
                "coefficients": coefficients,
                "ns_steps": ns_steps,
                "ns_epsilon": epsilon if ns_epsilon is None else ns_epsilon,
                "ns_dtype": ns_dtype,
                "ns_norm": ns_norm,
                "backend": backend,
                "batch_size": batch_size,
                "maximize": maximize,
                **group_defaults,
            },
        )

    _algorithm = "muon"


class NorMuon(Muon):
    """NorMuon (arXiv 2510.05491): Muon whose neurons are normalized by their own second moment.

    `ns_dtype="auto"` means what it means in Muon: float16 on CUDA, bfloat16 on a CPU that multiplies it fast, else
    float32. Takes Muon's arguments, and `muon_beta2` (0.95), the decay of the neurons' second moments, as a
    keyword or group key. State adds `variance_neuron`, one fp32 number an output row.
    """

    _algorithm = "normuon"


class MuonLP(Muon):
    """Muon with momentum stored in 8 bits (`state_precision="int8"`), or as given: `"int4"`, `"fp8"`. Needs torchao.

    Takes Muon's arguments. Every optimizer and group of this package takes `state_precision`; this is its short form.
    """

    def __init__(self, params: Any, *, state_precision: str = "int8", **options: Any) -> None:
        super().__init__(params, state_precision=state_precision, **options)


# AutoModel hands every optimizer class named Muon or NorMuon to Dion's class of that name
# (`is_dion_optimizer`), so that `_target_: dmuown.Muon` would train with another library. Only
# `__name__` differs from the public name; pickling goes by `__qualname__`.
Muon.__name__ = "DmuownMuon"
NorMuon.__name__ = "DmuownNorMuon"


class Muown(MuonEngine):
    """Muown (arXiv 2605.10797): Muon on directions, Adam on row magnitudes, W = g v / ||v||.

    Args:
        params: As `Muon`. fp32 parameters are recommended; other storage warns once.
        distributed_mesh: As `Muon`.
        lr: Learning rate of magnitudes; directions scale it by 0.2 sqrt(max(m, n)).
        mu: Direction momentum in [0, 1).
        betas: Adam's coefficients for magnitudes, and for AdamW and Lion groups.
        weight_decay: Decoupled decay of the original weight.
        epsilon: Adam's denominator, and floor of magnitudes and norms.
        nesterov: Nesterov momentum on directions.
        ns_steps: Newton-Schulz iterations.
        ns_epsilon: Stabilizer of the orthogonalization's norm.
        muon_update_scale: Multiplies direction updates alone; read from the configuration, also on resume.
        use_triton: Require Triton; buckets that its row kernels do not cover are logged once and keep torch.
        ns_dtype: Dtype of the orthogonalization. `"auto"`: float16 on CUDA, nearer than bfloat16 at the same speed
            (bfloat16 with `ns_form="plain"` or an own function); bfloat16 on a CPU that multiplies it fast; else
            float32. A torch dtype or its name, such as `"bfloat16"`, forces that one.
        scheme, coefficients, backend, batch_size, maximize, nonfinite: As `Muon`.

    Raises:
        OptionError, ParameterError, LayoutError: A bad option or parameter, before any allocation.
    """

    def __init__(
        self,
        params: Any,
        *,
        distributed_mesh: DeviceMesh | ProcessGroup | None = None,
        lr: float = 3e-4,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        epsilon: float = 1e-8,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_epsilon: float = 1e-7,
        muon_update_scale: float = 1.0,
        use_triton: bool = False,
        scheme: str | None = None,
        coefficients: Any = None,
        ns_dtype: Any = "auto",
        ns_norm: str = "add",
        backend: str = "auto",
        batch_size: int | None = None,
        maximize: bool = False,
        nonfinite: NonFinite = "propagate",
        newton_schulz_func: Callable[..., Tensor] | None = None,
        **group_defaults: Any,
    ) -> None:
        super().__init__(
            params,
            distributed_mesh=distributed_mesh,
            newton_schulz_func=newton_schulz_func,
            nonfinite=nonfinite,
            defaults={
                "algorithm": self._algorithm,
                "lr": lr,
                "mu": mu,
                "betas": betas,
                "weight_decay": weight_decay,
                "epsilon": epsilon,
                "nesterov": nesterov,
                "ns_steps": ns_steps,
                "ns_epsilon": ns_epsilon,
                "muon_update_scale": muon_update_scale,
                "use_triton": use_triton,
                "scheme": scheme,
                "coefficients": coefficients,
                "ns_dtype": ns_dtype,
                "ns_norm": ns_norm,
                "backend": backend,
                "batch_size": batch_size,
                "maximize": maximize,
                **group_defaults,
            },
        )

    _algorithm = "muown"


class NorMuown(Muown):
    """Muown with NorMuon's neuron normalization of the orthogonalized direction.

    `ns_dtype="auto"` means what it means in Muown: float16 on CUDA, bfloat16 on a CPU that multiplies it fast, else
    float32. Takes Muown's arguments, and `muon_beta2` (0.95), `normalization_epsilon` (1e-10) and
    `shape_scaling_type`: `"normuon"` 0.2 sqrt(max(1, m/n)), the published default, or `"muon"` 0.2 sqrt(max(m, n)).
    """

    _algorithm = "normuown"


class AngularMuown(MuonEngine):
    """AngularMuown (arXiv 2606.23637): row directions on the unit sphere, row magnitudes by Adam.

    Args:
        params: As `Muon`.
        lr: Learning rate of magnitudes and directions; about 0.04 is advised for pre-training.
        mu: Momentum of the tangent gradient, in [0, 1).
        betas, epsilon: Adam on magnitudes, and AdamW and Lion groups.
        nesterov: Look ahead along the momentum.
        weight_decay: For elementwise groups; a matrix group refuses any but 0.
        adjust_lr_fn: None or `"original"`: sqrt(max(1, m/n)); `"match_rms_adamw"`: 0.2 sqrt(max(m, n)).
        warmup_steps, decay_scale, decay_degree: kappa = (1 + decay_scale max(0, t - warmup_steps))^-decay_degree,
            t counted per group from 0. With a cosine schedule set `decay_degree=0`.
        ns_dtype: Dtype of the orthogonalization. `"auto"`: float16 on CUDA, nearer than bfloat16 at the same speed
            (bfloat16 with `ns_form="plain"` or an own function); bfloat16 on a CPU that multiplies it fast; else
            float32. A torch dtype or its name, such as `"bfloat16"`, forces that one.
        ns_steps, ns_epsilon, scheme, coefficients, backend, batch_size, maximize, nonfinite,
            newton_schulz_func, distributed_mesh: As `Muon`.

    Raises:
        OptionError, ParameterError, LayoutError: A bad option or parameter, before any allocation.
    """

    def __init__(
        self,
        params: Any,
        *,
        distributed_mesh: DeviceMesh | ProcessGroup | None = None,
        lr: float = 1e-2,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        epsilon: float = 1e-8,
        nesterov: bool = True,
        adjust_lr_fn: str | None = None,
        warmup_steps: int = 0,
        decay_scale: float = 0.001,
        decay_degree: float = 1.0,
        ns_steps: int = 5,
        ns_epsilon: float = 1e-7,
        scheme: str | None = None,
        coefficients: Any = None,
        ns_dtype: Any = "auto",
        ns_norm: str = "add",
        backend: str = "auto",
        batch_size: int | None = None,
        maximize: bool = False,
        nonfinite: NonFinite = "propagate",
        newton_schulz_func: Callable[..., Tensor] | None = None,
        **group_defaults: Any,
    ) -> None:
        super().__init__(
            params,
            distributed_mesh=distributed_mesh,
            newton_schulz_func=newton_schulz_func,
            nonfinite=nonfinite,
            defaults={
                "algorithm": "angular_muown",
                "lr": lr,
                "mu": mu,
                "betas": betas,
                "weight_decay": weight_decay,
                "epsilon": epsilon,
                "nesterov": nesterov,
                "adjust_lr_fn": adjust_lr_fn,
                "warmup_steps": warmup_steps,
                "decay_scale": decay_scale,
                "decay_degree": decay_degree,
                "ns_steps": ns_steps,
                "ns_epsilon": ns_epsilon,
                "scheme": scheme,
                "coefficients": coefficients,
                "ns_dtype": ns_dtype,
                "ns_norm": ns_norm,
                "backend": backend,
                "batch_size": batch_size,
                "maximize": maximize,
                **group_defaults,
            },
        )


def _dion_scheme(polar_express: bool, gram: bool, coefficients: Any) -> tuple[str, Any]:
    """Translate Dion's flags into a scheme and Dion's coefficients of it."""
    for name, flag in (("use_polar_express", polar_express), ("use_gram_newton_schulz", gram)):
        if not isinstance(flag, bool):
            raise OptionTypeError(name, f"must be True or False, got {flag!r}")
    if coefficients is not None:
        raise OptionError("coefficients", "needs `scheme` beside it", "Pass scheme='newton_schulz', for instance")
    if gram:
        return "gram", "polar_express_1.05"
    if polar_express:
        return "polar_express", "polar_express_1.02"
    return "newton_schulz", "you"
