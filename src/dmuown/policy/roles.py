"""What every parameter of a model is: embedding, head, norm, bias, convolution, router, expert or matrix.

The role comes from the module that owns the parameter, from its place in the model and from
identity (tied weights), and from names only where nothing else can tell. Names alone fail both
ways: a GPT-2 embedding is `wte`, a reward model's head is `score`, and `mlp.gate` is a router in
one model and half of a gated MLP in the next.

Pure torch; neither the model's library nor the host is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from dmuown.errors import ParameterError
from dmuown.policy.names import canonical_name


class Role(StrEnum):
    """What a parameter is for. Only MATRIX and EXPERT are orthogonalized as they are stored."""

    EMBEDDING = "embedding"
    """A table whose rows are looked up, or learned tokens and positions."""
    HEAD = "head"
    """The projection to logits, labels or scores, untied."""
    NORM = "norm"
    BIAS = "bias"
    CONV = "conv"
    """A dense convolution: a matrix once its input and kernel axes are flattened."""
    GROUPED_CONV = "grouped_conv"
    """A convolution in groups of several input channels each: no single matrix."""
    DEPTHWISE_CONV = "depthwise_conv"
    """A convolution with one input channel per group: a bank of filters, no matrix."""
    ROUTER = "router"
    """The gate that picks experts."""
    EXPERT = "expert"
    """A stack of matrices: the last two axes are one matrix, the leading ones count them."""
    MATRIX = "matrix"
    VECTOR = "vector"
    """Everything that acts elementwise: vectors, scalars, scales, matrices of one row or column."""


@dataclass(frozen=True)
class ParameterRole:
    """One parameter, once, however many names it goes by.

    Attributes:
        name: Canonical fully qualified name of its owner (see `canonical_name`).
        parameter: The parameter, any shape, plain or DTensor.
        role: What it is.
        transposed: The last two axes are stored [input, output] instead of [output, input].
        aliases: Canonical names of its other uses; not empty for tied weights.
        reason: What decided the role, for tables and error messages.
    """

    name: str
    parameter: nn.Parameter
    role: Role
    transposed: bool
    aliases: tuple[str, ...]
    reason: str


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter, trainable or not, by each of its canonical names.

    Raises:
        ParameterError: As `describe_parameters`.
    """
    described = describe_parameters(model, trainable_only=False)
    return {name: entry.role for entry in described for name in (entry.name, *entry.aliases)}


def describe_parameters(model: nn.Module, *, trainable_only: bool = True) -> list[ParameterRole]:
    """Describe every parameter of `model` once, in the order of `model.named_parameters()`.

    A parameter reached by several names is listed once. Its owner is the use with the strongest
    role (an embedding before the head tied to it), its other names are aliases.

    Args:
        model: Any module, wrapped or sharded. Its parameters are only looked at.
        trainable_only: Leave out parameters with `requires_grad=False`.

    Raises:
        ParameterError: A `_nemo_transposed_matrix_parameters` names no parameter of its module.
    """
    context = _Context.of(model)
    uses: dict[int, list[_Use]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if trainable_only and not parameter.requires_grad:
                continue
            uses.setdefault(id(parameter), []).append(_Use(_join(path, local), module, local, parameter))
    found = []
    for group in uses.values():
        judged = [(use, *_role_of(use, context)) for use in group]
        owner, role, reason = min(judged, key=lambda entry: _STRENGTH.get(entry[1], len(_STRENGTH)))
        aliases = dict.fromkeys(use.name for use in group if use.name != owner.name)
        transposed = role in (Role.MATRIX, Role.EXPERT) and _is_transposed(owner, context)
        found.append(ParameterRole(owner.name, owner.parameter, role, transposed, tuple(aliases), reason))
    return found


# Of several uses of one tensor the first of these decides.
_STRENGTH = {Role.EMBEDDING: 0, Role.HEAD: 1, Role.ROUTER: 2}

_LINEAR_LIKE = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_NORM_CLASS = re.compile(r"norm(alization)?(\dd)?$", re.IGNORECASE)
_NORM_NAME = re.compile(r"(^|_)(norm|layernorm|rmsnorm|ln)(_|\d|$)", re.IGNORECASE)
_EMBEDDING_CLASS = re.compile(r"embedding", re.IGNORECASE)
_EMBEDDING_NAME = re.compile(r"embed|embd|^wte$|^wpe$|^wt[pe]$", re.IGNORECASE)
_LEARNED_TOKENS = re.compile(r"embed|embd|(^|_)tokens?$|^latents?$", re.IGNORECASE)
_CONV_CLASS = re.compile(r"Conv(Transpose)?[123]d")
_ROUTER_CLASS = re.compile(r"(router|gate|gating)$", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"(^|_)router$|expert_gate$", re.IGNORECASE)
_EXPERT_WORD = re.compile(r"expert", re.IGNORECASE)
_HEAD_NAME = re.compile(r"_head$|^(score|classifier|qa_outputs|embed_out|unembed|unembedding|to_logits|logits)$")
_HEAD_CLASS = re.compile(r"(ClassificationHead|LMHead)$")
# Common names inside blocks as well, so they count only outside repeated blocks.
_HEAD_NAME_OUTSIDE_BLOCKS = re.compile(r"^(head|heads|output|out|proj_out|output_layer|output_projection)$")
_ELEMENTWISE_NAME = re.compile(r"^A_log$|scales?$|gamma$|^lambda")
# components/moe/experts.py of nemo-automodel 0.7: `gate_and_up_projs`, `down_projs` and the LoRA
# stacks of their subclasses are [expert, input, output], and nothing in 0.7.0 says so.
_HOST_TRANSPOSED_EXPERTS = frozenset({"GroupedExperts", "GroupedExpertsDeepEP"})


@dataclass(frozen=True)
class _Use:
    name: str
    module: nn.Module
    local: str
    parameter: nn.Parameter

    @property
    def path(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def components(self) -> list[str]:
        return self.path.split(".") if self.path else []

    @property
    def in_block(self) -> bool:
        """Whether an index stands in the path: the module is one of a list, such as layers or experts."""
        return any(part.isdigit() for part in self.components)


@dataclass(frozen=True)
class _Context:
    """What the model says about itself as a whole."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    output_sizes: frozenset[int]
    transposed: frozenset[str]
    moe_gates: frozenset[str]
    head_containers: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> _Context:
        inputs: set[int] = set()
        outputs: set[int] = set()
        sizes: set[int] = set()
        transposed: set[str] = set()
        gates: set[str] = set()
        containers: list[str] = []
        for path, module in model.named_modules(remove_duplicate=False):
            inputs |= _weights_of(module, "get_input_embeddings")
            outputs |= _weights_of(module, "get_output_embeddings")
            if isinstance(module, nn.Embedding):
                sizes.add(module.num_embeddings)
            transposed |= {_join(path, local) for local in _declared_transposed(path, module)}
            if any(_EXPERT_WORD.search(name) or _named(child, _EXPERT_WORD) for name, child in module.named_children()):
                gates |= {_join(path, name) for name in ("gate", "wg")}
            if path and _named(module, _HEAD_CLASS):
                containers.append(_join(path, ""))
        config = getattr(model, "config", None)
        sizes |= {size for key in ("vocab_size", "num_labels") if isinstance(size := getattr(config, key, None), int)}
        return cls(
            frozenset(inputs),
            frozenset(outputs),
            frozenset(sizes),
            frozenset(transposed),
            frozenset(gates),
            tuple(containers),
        )


def _weights_of(module: nn.Module, getter: str) -> set[int]:
    """Identities of the matrices directly in the module that a model's own accessor returns."""
    method = getattr(module, getter, None)
    if not callable(method):
        return set()
    try:
        owner: Any = method()
    except Exception:  # transformers' base classes raise various errors where there is no such layer
        return set()
    if not isinstance(owner, nn.Module) or _is_conv(owner):
        return set()
    return {id(parameter) for parameter in owner.parameters(recurse=False) if parameter.ndim == 2}


def _declared_transposed(path: str, module: nn.Module) -> Iterator[str]:
    for local in getattr(module, "_nemo_transposed_matrix_parameters", None) or ():
        try:
            module.get_parameter(local)
        except AttributeError:
            raise ParameterError(
                f"{path or type(module).__name__}._nemo_transposed_matrix_parameters",
                f"lists {local!r}, which is no parameter of {type(module).__name__}",
                "List the names of the module's own parameters that are stored [..., input, output]",
            ) from None
        yield local


def _join(path: str, local: str) -> str:
    return canonical_name(f"{path}.{local}" if path else local)


def _named(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    """Whether any class of the module matches; FSDP2 and LoRA put subclasses in front of the original."""
    return any(pattern.search(cls.__name__) for cls in type(module).__mro__[:-2])


def _is_conv(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.conv._ConvNd):
        return True
    return _named(module, _CONV_CLASS) and isinstance(getattr(module, "weight", None), torch.Tensor)


def _conv_role(use: _Use) -> tuple[Role, str]:
    groups = getattr(use.module, "groups", 1)
    transposed = bool(getattr(use.module, "transposed", False))
    # Weights are [out, in / groups, *kernel], and [in, out / groups, *kernel] in transposed convolutions.
    channels = use.parameter.shape[0] // groups if transposed else use.parameter.shape[1]
    if groups == 1:
        return Role.CONV, "convolution"
    if channels == 1:
        return Role.DEPTHWISE_CONV, "convolution with one input channel per group"
    return Role.GROUPED_CONV, f"convolution in {groups} groups"


def _role_of(use: _Use, context: _Context) -> tuple[Role, str]:
    """Role of one use and what decided it. The first rule that applies wins."""
    kind = type(use.module).__name__
    parameter = use.parameter
    if {"bias", "biases"} & set(use.local.split("_")):
        return Role.BIAS, f"named {use.local!r}"
    if isinstance(use.module, nn.Embedding | nn.EmbeddingBag) or id(parameter) in context.inputs:
        return Role.EMBEDDING, f"weight of {kind}"
    if not isinstance(use.module, _LINEAR_LIKE):
        if _named(use.module, _NORM_CLASS):
            return Role.NORM, f"parameter of {kind}"
        if parameter.ndim >= 2 and not _is_conv(use.module) and _is_table(use):
            return Role.EMBEDDING, f"parameter {use.local!r} of {kind} {use.path!r}"
    if parameter.ndim < 2:
        norm = bool(use.components and _NORM_NAME.search(use.components[-1])) or bool(_NORM_NAME.search(use.local))
        return (Role.NORM if norm else Role.VECTOR), f"{parameter.ndim} axes"
    if _is_conv(use.module) and parameter.ndim > 2:
        return _conv_role(use)
    if _is_lora(use):
        return _plain_role(use)
    if _is_router(use, context):
        return Role.ROUTER, f"gate of experts, {kind}"
    head = _head_reason(use, context)
    if head:
        return Role.HEAD, head
    return _plain_role(use)


def _plain_role(use: _Use) -> tuple[Role, str]:
    parameter = use.parameter
    if min(parameter.shape[-2:]) == 1:
        return Role.VECTOR, "one row or column"
    if _ELEMENTWISE_NAME.search(use.local):
        return Role.VECTOR, f"named {use.local!r}, acts elementwise"
    if parameter.ndim > 2:
        return Role.EXPERT, f"stack of {_leading(parameter)} matrices"
    return Role.MATRIX, f"matrix of {type(use.module).__name__}"


def _leading(parameter: nn.Parameter) -> int:
    count = 1
    for size in parameter.shape[:-2]:
        count *= size
    return count


def _is_table(use: _Use) -> bool:
    """Whether a parameter of a module that is neither linear, norm nor convolution is looked up, not multiplied."""
    if _named(use.module, _EMBEDDING_CLASS) or _LEARNED_TOKENS.search(use.local):
        return True
    return bool(use.components and use.local == "weight" and _EMBEDDING_NAME.search(use.components[-1]))


def _is_lora(use: _Use) -> bool:
    """Adapters are matrices of their own, also beside a head or a router."""
    return use.local.startswith("lora_") or any(part.startswith("lora_") for part in use.components)


def _is_router(use: _Use, context: _Context) -> bool:
    if not use.components:
        return False
    if _ROUTER_NAME.search(use.components[-1]) or use.path in context.moe_gates:
        return True
    return not isinstance(use.module, nn.Linear) and _named(use.module, _ROUTER_CLASS)


def _head_reason(use: _Use, context: _Context) -> str:
    if id(use.parameter) in context.outputs:
        return "the model's output embeddings"
    if use.parameter.ndim != 2:
        return ""
    for part in use.components:
        if _HEAD_NAME.search(part):
            return f"in {part!r}"
    if any(f"{use.path}.".startswith(container) for container in context.head_containers):
        return "in a head class"
    if use.in_block or not use.components:
        return ""
    if _HEAD_NAME_OUTSIDE_BLOCKS.search(use.components[-1]) or use.components == ["fc"]:
        return f"{use.components[-1]!r} outside the blocks"
    if isinstance(use.module, nn.Linear) and use.module.out_features in context.output_sizes:
        return f"{use.module.out_features} outputs, the size of the vocabulary or of the labels, outside the blocks"
    return ""


def _is_transposed(use: _Use, context: _Context) -> bool:
    if use.name in context.transposed:
        return True
    for cls in type(use.module).__mro__:
        if cls.__name__ in _HOST_TRANSPOSED_EXPERTS and cls.__module__.startswith("nemo_automodel."):
            return use.parameter.ndim >= 3
        if cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers."):
            return True  # GPT-2's linear layer, whose weight is [input, output]
    # Experts of transformers 5 say how they are stored.
    return use.parameter.ndim >= 3 and getattr(use.module, "is_transposed", False) is True
