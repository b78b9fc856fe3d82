"""The routing policy as its users write it: in Python, as plain dictionaries, or in YAML.

    policy = ParamPolicy.model_validate({
        "defaults": {"route": "muon", "param_dtype": "bfloat16"},
        "overrides": [
            {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
            {"name": ["norm", ".bias"], "set": {"route": "adamw"}},
        ],
    })

This is the only module of the package that imports pydantic, besides the host's configurations and
the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dmuown.errors import DmuownError, OptionError
from dmuown.policy.names import nearest
from dmuown.policy.resolve import FIELD_NAMES, ROUTES
from dmuown.policy.roles import Role

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "f32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
}
_ROLES = tuple(role.value for role in Role)
_CONVOLUTIONS = ("grouped_conv", "depthwise_conv")
_SELECTORS = ("name", "contains", "regex", "role")


def parse_dtype(value: object, key: str = "dtype") -> torch.dtype | None:
    """Return the floating-point dtype that `value` names.

    Args:
        value: A torch dtype; a string such as `bfloat16`, `bf16` or `torch.bfloat16`; or None, also as
            `none` or `null`.
        key: The option's name, for the error.

    Raises:
        OptionError: Not a dtype, or not a floating-point one.
    """
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        if not value.is_floating_point:
            raise OptionError(key, f"must be a floating-point dtype, got {value}", "Use 'bfloat16' or 'float32'")
        return value
    if isinstance(value, str):
        text = value.strip().lower().removeprefix("torch.")
        if text in ("", "none", "null"):
            return None
        if text in _DTYPES:
            return _DTYPES[text]
        raise OptionError(key, f"unknown dtype {value!r}", nearest(text, _DTYPES))
    raise OptionError(key, f"must be a torch dtype or its name, got {value!r}", "For example 'bfloat16'")


def parse_route(value: object, key: str = "route") -> str | None:
    """Return the route that `value` names; None (also as `none` or `null`) leaves it to the default.

    Raises:
        OptionError: Not one of `muon`, `adamw`, `sharded_adamw`.
    """
    if value is None:
        return None
    text = value.strip().lower() if isinstance(value, str) else ""
    if isinstance(value, str) and text in ("none", "null"):
        return None
    if text not in ROUTES:
        raise OptionError(key, f"unknown route {value!r}", nearest(text, ROUTES))
    return text


class _Strict(BaseModel):
    """A model that refuses unknown keys with the nearest known one, in this package's errors."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _as_option_error(type(self).__name__, error) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a model, a mapping, or (for `ParamPolicy`) YAML text.

        Raises:
            OptionError: Unknown keys, routes, dtypes or roles, each with the nearest known name; values of
                the wrong type; selectors that contradict each other.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _as_option_error(cls.__name__, error) from None

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        return _check_keys(cls, values)


class PolicyFields(_Strict):
    """What a policy decides for a parameter; fields that are not given leave the earlier value.

    Attributes:
        route: `muon`, `adamw` or `sharded_adamw`; None becomes `muon`.
        param_dtype: Dtype of the whole parameter in forward and backward, and of its transfer there;
            None keeps the parameter's own.
        grad_dtype: Dtype of the gradient's buffer and reduction; None follows `param_dtype`.
        output_dtype: Floating-point outputs of the hook boundary are cast to it; None leaves them.
        cast_forward_inputs: Whether floating-point inputs of the hook boundary are cast to `param_dtype`.
        master_dtype: Dtype of the stored parameter that the optimizer updates; None keeps its own.
        optim_dtype: Dtype of the optimizer's state; weights are updated in the wider of it and `master_dtype`,
            and rounded to `master_dtype`. None follows `master_dtype`. Numbers per row stay float32.
    """

    route: str | None = None
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    master_dtype: torch.dtype | None = torch.float32
    optim_dtype: torch.dtype | None = torch.float32

    @field_validator("route", mode="before")
    @classmethod
    def _route(cls, value: object) -> str | None:
        return parse_route(value)

    @field_validator("param_dtype", "grad_dtype", "output_dtype", "master_dtype", "optim_dtype", mode="before")
    @classmethod
    def _dtype(cls, value: object, info: Any) -> torch.dtype | None:
        return parse_dtype(value, info.field_name)

    @field_validator("cast_forward_inputs", mode="before")
    @classmethod
    def _boolean(cls, value: object, info: Any) -> bool:
        if not isinstance(value, bool):
            raise OptionError(info.field_name, f"must be true or false, got {value!r}")
        return value

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, with their parsed values."""
        return {name: getattr(self, name) for name in FIELD_NAMES if name in self.model_fields_set}


class Override(_Strict):
    """One rule: which parameters it matches, and the fields that it sets on them.

    A parameter matches if it matches every selector that is given.

    Attributes:
        name: Tokens, one of which must be a substring of the full canonical name.
        contains: Legacy alias of `name`.
        regex: Regular expressions, one of which must match somewhere in the full canonical name.
        role: Module roles, one of which must be the parameter's: `embedding`, `head`, `norm`, `bias`,
            `conv`, `router`, `expert`; also the finer ones of `dmuown.policy.roles.Role`.
        set: The fields to set.
    """

    name: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    regex: tuple[str, ...] = ()
    role: tuple[str, ...] = ()
    set: PolicyFields = Field(...)

    @field_validator(*_SELECTORS, mode="before")
    @classmethod
    def _tokens(cls, value: object, info: Any) -> tuple[str, ...]:
        tokens = (value,) if isinstance(value, str) else value
        if not isinstance(tokens, (list, tuple)) or not all(isinstance(token, str) for token in tokens):
            raise OptionError(info.field_name, f"must be a string or a list of strings, got {value!r}")
        if not tokens or "" in tokens:
            # An empty token is a substring of every name: it would route the whole model.
            raise OptionError(
                info.field_name, f"must hold at least one token, none of them empty, got {value!r}", "Use `defaults`"
            )
        return tuple(tokens)

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptionError("regex", f"{pattern!r} is no regular expression: {error}") from None
        return value

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for role in value:
            if role not in _ROLES:
                raise OptionError("role", f"unknown role {role!r}", nearest(role, _ROLES))
        return value

    @model_validator(mode="after")
    def _selectors(self) -> Self:
        if self.name and self.contains:
            raise OptionError("name", "excludes its legacy alias 'contains'", "Keep 'name'")
        if not any(getattr(self, selector) for selector in _SELECTORS):
            raise OptionError(
                "", "an override needs a selector: name, regex or role", "What holds for all goes to `defaults`"
            )
        if not self.set.model_fields_set:
            raise OptionError("set", "must set at least one field", "Remove the override if it has no effect")
        return self

    def matches(self, name: str, role: str | None) -> bool:
        """Whether the parameter of this canonical name and role matches every selector given."""
        tokens = self.name or self.contains
        return (
            (not tokens or any(token in name for token in tokens))
            and (not self.regex or any(re.search(pattern, name) for pattern in self.regex))
            and (not self.role or self._has_role(role))
        )

    def _has_role(self, role: str | None) -> bool:
        # Grouped and depthwise convolutions are roles of their own; `conv` selects all convolutions.
        return role in self.role or (role in _CONVOLUTIONS and "conv" in self.role)


class ParamPolicy(_Strict):
    """Rules that decide route and precision of every parameter.

    Attributes:
        defaults: Fields of a parameter that no override matches.
        overrides: Applied in order; every one that matches counts, and later ones win field by field.
    """

    defaults: PolicyFields = Field(default_factory=PolicyFields)
    overrides: tuple[Override, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _text(cls, values: Any) -> Any:
        if not isinstance(values, str):
            return values
        import yaml

        try:
            parsed = yaml.safe_load(values)
        except yaml.YAMLError as error:
            raise OptionError("param_policy", f"is no valid YAML: {error}") from None
        if not isinstance(parsed, Mapping):
            raise OptionError("param_policy", f"must be a mapping, got {type(parsed).__name__}")
        # The validator of unknown keys, declared in the base, ran before this one.
        return _check_keys(cls, parsed)

    @field_validator("defaults", mode="before")
    @classmethod
    def _no_defaults(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("overrides", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        if value is None:
            return ()
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            raise OptionError("overrides", f"must be a list of overrides, got {type(value).__name__}")
        return tuple(value)


_TITLES = {"PolicyFields": "the policy's fields", "Override": "an override", "ParamPolicy": "the policy"}


def _check_keys(cls: type[BaseModel], values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    for key in values:
        if key not in cls.model_fields:
            raise OptionError(str(key), f"unknown key of {_TITLES[cls.__name__]}", _nearest_key(key, cls))
    return dict(values)


def _nearest_key(key: object, cls: type[BaseModel]) -> str:
    # A field at the level of the override is the likeliest slip: say where it belongs.
    if str(key) in FIELD_NAMES and cls.__name__ in ("Override", "ParamPolicy"):
        place = "set" if cls.__name__ == "Override" else "defaults"
        return f"Put it under {place!r}"
    return nearest(str(key), cls.model_fields)


def _as_option_error(title: str, error: ValidationError) -> OptionError:
    """Pydantic's first complaint as ours: `overrides.1.set.route: unknown route 'muno'. Did you mean ...`."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, DmuownError):
        subject = (
            place
            if not cause.subject or place.split(".")[-1] == cause.subject
            else ".".join(part for part in (place, cause.subject) if part)
        )
        return OptionError(subject, cause.rule, cause.remedy)
    if first["type"] == "missing":
        return OptionError(place, "is required and missing")
    return OptionError(place or title, f"must be a mapping, got {first['input']!r}")
