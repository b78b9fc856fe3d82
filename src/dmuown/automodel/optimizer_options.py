"""The options of every optimizer configuration, checked without the host.

`dmuown check` and `dmuown plan` read these; `dmuown.automodel.configs` joins each with the host's own base class.
Importing this module imports neither the host nor transformers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from dmuown.automodel import options
from dmuown.automodel.grouping import GroupingRules, Override, build_param_groups, count_matrices
from dmuown.automodel.option_checks import check_as_group, parse_policy, precision_fields
from dmuown.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)

_GROUPING_FIELDS = frozenset(
    {
        "scalar_opt",
        "scalar_betas",
        "scalar_eps",
        "scalar_lr",
        "embed_lr",
        "lm_head_lr",
        "adamw_param_patterns",
        "param_group_overrides",
        "param_policy",
        "flatten",
        "auto_split",
        "per_head",
        "qkv_heuristic",
    }
)


def _override(key: str, value: Any) -> Override:
    """An entry of `param_group_overrides`: a mapping, or an object such as the host's ParamGroupOverride."""
    if not isinstance(value, Mapping) and hasattr(value, "pattern"):
        value = {name: getattr(value, name) for name in ("pattern", "lr_mult", "wd_mult")}
    return Override(**options.override(key, value))


@dataclass
class MatrixOptions:
    """Options that every configuration here shares; use one of the subclasses.

    Matrices and stacks of experts go to the subclass's algorithm; embeddings, output heads, norms,
    biases, routers and convolutions to `scalar_opt`. What a parameter is comes from its module
    (`dmuown.policy.roles`). Numbers may be strings, since YAML reads `1e-4` as one.

    Attributes:
        lr: Base learning rate; the host's scheduler scales it.
        weight_decay: Decoupled decay; embeddings and heads have none.
        mu: Momentum of matrices, in [0, 1).
        betas: Adam coefficients of the optimizer.
        epsilon: Stabilizer of the optimizer, > 0.
        nesterov: Nesterov momentum on matrices.
        use_triton: Triton kernels where they apply; an error without Triton.
        flatten: Orthogonalize dense convolutions, input and kernel axes flattened. Convolutions in
            groups stay with `scalar_opt`.
        auto_split: Cut fused weights (q/k/v, gate/up) into their blocks, by the model's config.
        per_head: With `auto_split`: cut attention's weights, fused or not, into heads instead.
        qkv_heuristic: Cut matrices of three times as many rows as columns into three, as Muown's authors guess; what
            `auto_split` cuts stays as it does.
        scalar_opt: "adamw" or "lion".
        scalar_betas, scalar_eps: Coefficients and epsilon of `scalar_opt`.
        scalar_lr: Rate of `scalar_opt`; None is `lr`.
        embed_lr: Rate of embeddings; None is `scalar_lr`, then `lr`. A head tied to the embedding is
            the embedding.
        lm_head_lr: Rate of untied output heads; None is `lr`.
        param_group_overrides: {pattern, lr_mult, wd_mult} each; the first that matches a name counts.
        adamw_param_patterns: Regular expressions of names sent to AdamW at `scalar_lr`.
        param_policy: Rules of `dmuown.ParamPolicy` (a mapping or YAML text) that route every parameter instead of
            its role: `muon` to the algorithm, `adamw` and `sharded_adamw` to `scalar_opt`. Their precision fields
            count under the ownership runtime only, which `DMuonConfig` uses.
        ns_steps: Iterations of the orthogonalization, >= 1.
        ns_epsilon: Stabilizer of its normalization, > 0.
        scheme, coefficients, ns_dtype, backend: The orthogonalizer; see `dmuown.orthogonalize.Orthogonalizer`.
            `ns_dtype: auto` is float16 on CUDA, bfloat16 on a CPU that multiplies it fast, else float32.
        batch_bytes: Bytes that orthogonalization may take on a rank in one task, one parameter at least, such as
            201326592 (192 MiB); None takes whole buckets.
        nonfinite: "propagate", "skip" or "raise" at a gradient that is not finite. `dmuown finetune` takes
            "raise" where the YAML says nothing.

    Raises:
        OptionError: An unknown option, or a value out of range; before any work, on every rank.
        MissingDependencyError: `use_triton` without Triton.
    """

    supports_megatron_fsdp_sharding: ClassVar[bool] = False
    algorithm: ClassVar[str] = ""
    optimizer_name: ClassVar[str] = ""
    matrix_decay: ClassVar[bool] = True

    param_group_overrides: list[Any] = field(default_factory=list)
    lr: float = 3e-4
    weight_decay: float = 0.0
    mu: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    nesterov: bool = True
    use_triton: bool = False
    flatten: bool = False
    auto_split: bool = False
    per_head: bool = False
    qkv_heuristic: bool = False
    scalar_opt: str = "adamw"
    scalar_betas: tuple[float, float] = (0.9, 0.999)
    scalar_eps: float = 1e-8
    scalar_lr: float | None = None
    embed_lr: float | None = None
    lm_head_lr: float | None = None
    adamw_param_patterns: list[str] = field(default_factory=list)
    param_policy: Any = None
    ns_steps: int = 5
    ns_epsilon: float | None = 1e-7
    scheme: str | None = None
    coefficients: Any = None
    ns_dtype: str = "auto"
    backend: str = "auto"
    batch_bytes: int | None = None
    nonfinite: str = "propagate"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Before the generated __init__, whose TypeError would name neither the section nor the remedy.
        options.reject_unknown(kwargs, [entry.name for entry in dataclasses.fields(cls) if entry.init], cls.title())
        instance: Self = super().__new__(cls)
        return instance

    def __post_init__(self) -> None:
        overrides = [] if self.param_group_overrides is None else self.param_group_overrides
        if isinstance(overrides, str | Mapping) or not isinstance(overrides, Sequence):
            raise OptionError(
                "param_group_overrides", f"must be a list, got {overrides!r}", "Write a list of {pattern: ...}"
            )
        self.param_group_overrides = [
            _override(f"param_group_overrides[{index}]", entry) for index, entry in enumerate(overrides)
        ]
        self.lr = options.not_negative("lr", self.lr)
        self.weight_decay = options.not_negative("weight_decay", self.weight_decay)
        self.mu = options.coefficient("mu", self.mu)
        self.betas = options.coefficients("betas", self.betas)
        self.epsilon = options.positive("epsilon", self.epsilon)
        for key in ("nesterov", "flatten", "auto_split", "per_head", "qkv_heuristic"):
            setattr(self, key, options.switch(key, getattr(self, key)))
        if self.per_head and not self.auto_split:
            raise OptionError("per_head", "needs auto_split, which finds the heads", "Set auto_split: true as well")
        self.scalar_opt = options.choice("scalar_opt", self.scalar_opt, ("adamw", "lion"))
        self.scalar_betas = options.coefficients("scalar_betas", self.scalar_betas)
        self.scalar_eps = options.positive("scalar_eps", self.scalar_eps)
        for key in ("scalar_lr", "embed_lr", "lm_head_lr"):
            if getattr(self, key) is not None:
                setattr(self, key, options.not_negative(key, getattr(self, key)))
        self.adamw_param_patterns = options.patterns("adamw_param_patterns", self.adamw_param_patterns)
        self.param_policy = parse_policy(self.param_policy)
        if self.param_policy is not None and self.adamw_param_patterns:
            raise OptionError(
                "adamw_param_patterns",
                "excludes param_policy, which routes every parameter",
                "Add an override with regex",
            )
        self.use_triton = options.switch("use_triton", self.use_triton)
        self.ns_steps = options.count("ns_steps", self.ns_steps)
        if self.batch_bytes is not None:
            self.batch_bytes = options.count("batch_bytes", self.batch_bytes)
        if self.ns_epsilon is not None:
            self.ns_epsilon = options.positive("ns_epsilon", self.ns_epsilon)
        self.check_own()
        check_as_group(self.optimizer_class(), self.optimizer_options())

    @classmethod
    def title(cls) -> str:
        """Return the name that YAML files use for this configuration."""
        return f"{cls.__name__.removesuffix('Options').removesuffix('Config')}Config"

    def check_own(self) -> None:
        """Check and convert the options that a subclass adds."""

    def grouping_rules(self) -> GroupingRules:
        """Return where each role of parameter goes under this configuration."""
        return GroupingRules(
            algorithm=self.algorithm,
            scalar_algorithm=self.scalar_opt,
            lr=self.lr,
            weight_decay=self.weight_decay,
            matrix_decay=self.matrix_decay,
            scalar_lr=self.scalar_lr,
            embed_lr=self.embed_lr,
            lm_head_lr=self.lm_head_lr,
            scalar_betas=self.scalar_betas,
            scalar_eps=self.scalar_eps,
            flatten=self.flatten,
            adamw_patterns=self.adamw_param_patterns,
            overrides=self.param_group_overrides,
            policy=self.param_policy,
            auto_split=self.auto_split,
            per_head=self.per_head,
            qkv_heuristic=self.qkv_heuristic,
        )

    def optimizer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer class, groups and mesh excepted."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if entry.name not in _GROUPING_FIELDS
        }

    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """Return the optimizer class that `build` constructs."""
        from dmuown.engine import optimizers

        found: type[torch.optim.Optimizer] = getattr(optimizers, self.optimizer_name)
        return found

    def build(
        self, model: torch.nn.Module, *, device_mesh: DeviceMesh | None = None, is_peft: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Build one optimizer per part of `model` (`model.parts`, or the model itself).

        Args:
            model: The model after sharding; its parameters may be DTensors.
            device_mesh: The host's mesh. Type-checked by the optimizer, whose collectives follow
                each parameter's own mesh.
            is_peft: Whether adapters are trained; nothing here depends on it.
        """
        parts: Sequence[torch.nn.Module] = getattr(model, "parts", [model])
        if self.param_policy is not None and (ignored := precision_fields(self.param_policy)):
            logger.warning(
                "param_policy: %s have no effect without the ownership runtime (dmuown.automodel.DMuonConfig)",
                ", ".join(ignored),
            )
        optimizer_class, shared = self.optimizer_class(), self.optimizer_options()
        built: list[torch.optim.Optimizer] = []
        for groups in build_param_groups(parts, self.grouping_rules()):
            logger.info(
                "%s: %d matrices by %s, in %d groups of parameters",
                self.optimizer_name,
                count_matrices(groups),
                self.algorithm,
                len(groups),
            )
            built.append(optimizer_class(groups, distributed_mesh=device_mesh, **shared))  # type: ignore[call-arg]
        return built

    def build_from_param_groups(
        self, param_groups: list[dict[str, Any]], *, device_mesh: DeviceMesh | None = None
    ) -> torch.optim.Optimizer:
        """Build one optimizer from the caller's own groups, which say `algorithm` where it is not this one."""
        return self.optimizer_class()(param_groups, distributed_mesh=device_mesh, **self.optimizer_options())  # type: ignore[call-arg]


@dataclass
class MuownOptions(MatrixOptions):
    """`dmuown.Muown`: Muon on directions, Adam on magnitudes.

    Options and defaults are those of AutoModel's later MuownConfig, and those of the base class.

    Attributes:
        muon_update_scale: Factor on direction updates only, >= 0. Read from here, also on resume.
    """

    algorithm: ClassVar[str] = "muown"
    optimizer_name: ClassVar[str] = "Muown"

    muon_update_scale: float = 1.0

    def check_own(self) -> None:
        """Check and convert the options that this class adds."""
        self.muon_update_scale = options.not_negative("muon_update_scale", self.muon_update_scale)


@dataclass
class NorMuownOptions(MuownOptions):
    """`dmuown.NorMuown`: Muown whose orthogonalized direction is normalized neuron by neuron.

    Attributes:
        muon_beta2: Decay of the neurons' second moments, in [0, 1).
        normalization_epsilon: Stabilizer of the normalization, > 0.
        shape_scaling_type: "muon" or "normuon": how the rate follows a matrix's shape.
    """

    algorithm: ClassVar[str] = "normuown"
    optimizer_name: ClassVar[str] = "NorMuown"

    muon_beta2: float = 0.95
    normalization_epsilon: float = 1e-10
    shape_scaling_type: str = "normuon"

    def check_own(self) -> None:
        """Check and convert the options that this class adds."""
        super().check_own()
        self.muon_beta2 = options.coefficient("muon_beta2", self.muon_beta2)
        self.normalization_epsilon = options.positive("normalization_epsilon", self.normalization_epsilon)
        self.shape_scaling_type = options.choice("shape_scaling_type", self.shape_scaling_type, ("muon", "normuon"))


@dataclass
class MuonOptions(MatrixOptions):
    """`dmuown.Muon`, with the options and defaults of the host's own MuonConfig and Dion's Muon.

    Attributes:
        adjust_lr: "spectral_norm", "rms_norm", "keller" or None: how the rate follows a matrix's shape.
        cautious_wd: Decay only where update and weight agree in sign.
        use_polar_express: Dion's Polar Express coefficients, or Jiacheng You's; unless `scheme` is set.
        use_gram_newton_schulz: Iterate on the Gram matrix, with Dion's coefficients; unless `scheme` is set.
        ns_epsilon: None is `epsilon`, as in Dion.
    """

    algorithm: ClassVar[str] = "muon"
    optimizer_name: ClassVar[str] = "Muon"

    lr: float = 5e-4
    nesterov: bool = False
    ns_epsilon: float | None = None
    adjust_lr: str | None = "spectral_norm"
    cautious_wd: bool = False
    use_polar_express: bool = True
    use_gram_newton_schulz: bool = False

    def check_own(self) -> None:
        """Check and convert the options that this class adds."""
        self.adjust_lr = options.choice("adjust_lr", self.adjust_lr, ("spectral_norm", "rms_norm", "keller", None))
        for key in ("cautious_wd", "use_polar_express", "use_gram_newton_schulz"):
            setattr(self, key, options.switch(key, getattr(self, key)))


@dataclass
class NorMuonOptions(MuonOptions):
    """`dmuown.NorMuon`: Muon whose update is normalized neuron by neuron.

    Attributes:
        muon_beta2: Decay of the neurons' second moments, in [0, 1).
    """

    algorithm: ClassVar[str] = "normuon"
    optimizer_name: ClassVar[str] = "NorMuon"

    muon_beta2: float = 0.95

    def check_own(self) -> None:
        """Check and convert the options that this class adds."""
        super().check_own()
        self.muon_beta2 = options.coefficient("muon_beta2", self.muon_beta2)


@dataclass
class AngularMuownOptions(MatrixOptions):
    """`dmuown.AngularMuown`: row directions on the unit sphere, row magnitudes by Adam.

    `weight_decay` reaches elementwise groups only: on the sphere a matrix has none.

    Attributes:
        adjust_lr_fn: None or "original", or "match_rms_adamw".
        warmup_steps, decay_scale, decay_degree: The algorithm's own decay of the angular rate. Under a
            scheduler that decays, such as the host's cosine, set `decay_degree: 0`.
    """

    algorithm: ClassVar[str] = "angular_muown"
    optimizer_name: ClassVar[str] = "AngularMuown"
    matrix_decay: ClassVar[bool] = False

    lr: float = 1e-2
    adjust_lr_fn: str | None = None
    warmup_steps: int = 0
    decay_scale: float = 0.001
    decay_degree: float = 1.0

    def check_own(self) -> None:
        """Check and convert the options that this class adds."""
        self.decay_scale = options.not_negative("decay_scale", self.decay_scale)
        self.decay_degree = options.not_negative("decay_degree", self.decay_degree)

    def optimizer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer class; decay is in the groups."""
        return super().optimizer_options() | {"weight_decay": 0.0}


OPTIONS_BY_ALGORITHM: Mapping[str, type[MatrixOptions]] = {
    "muown": MuownOptions,
    "muon": MuonOptions,
    "normuon": NorMuonOptions,
    "normuown": NorMuownOptions,
    "angular_muown": AngularMuownOptions,
}
"""Options by the name of the algorithm of matrices."""
