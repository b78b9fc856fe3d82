"""What a policy may hold, and what is said of one that may not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from dmuown.errors import OptionError
from dmuown.policy import ParamPolicy
from dmuown.policy.schema import PolicyFields, parse_dtype, parse_route

# The table of the routing guide's section "Routing Policy", word for word.
GUIDE: dict[str, Any] = {
    "defaults": {
        "route": "muon",
        "param_dtype": torch.bfloat16,
        "grad_dtype": None,
        "master_dtype": torch.float32,
        "optim_dtype": torch.float32,
    },
    "overrides": [
        {
            "name": ["embed_tokens", "word_embeddings", "wte", "lm_head"],
            "set": {"route": "sharded_adamw"},
        },
        {
            "name": ["norm", "ln_", ".bias"],
            "set": {"route": "adamw"},
        },
        {
            "name": ["action_head", "action_decoder"],
            "set": {
                "param_dtype": torch.float32,
                "grad_dtype": torch.float32,
                "output_dtype": torch.float32,
                "cast_forward_inputs": True,
            },
        },
    ],
}


def test_guide_table_is_accepted_verbatim() -> None:
    policy = ParamPolicy.model_validate(GUIDE)
    assert policy.defaults.given() == GUIDE["defaults"]
    assert [override.name for override in policy.overrides] == [tuple(entry["name"]) for entry in GUIDE["overrides"]]
    assert policy.overrides[2].set.given() == GUIDE["overrides"][2]["set"]


def test_yaml_means_the_same_as_python() -> None:
    text = """
    defaults: {route: muon, param_dtype: bfloat16, grad_dtype: null, master_dtype: torch.float32, optim_dtype: fp32}
    overrides:
      - name: [embed_tokens, word_embeddings, wte, lm_head]
        set: {route: sharded_adamw}
      - name: [norm, ln_, .bias]
        set: {route: adamw}
      - name: [action_head, action_decoder]
        set: {param_dtype: float32, grad_dtype: float, output_dtype: fp32, cast_forward_inputs: true}
    """
    assert ParamPolicy.model_validate(text) == ParamPolicy.model_validate(GUIDE)


def test_yaml_is_data_only() -> None:
    with pytest.raises(OptionError, match="no valid YAML"):
        ParamPolicy.model_validate("defaults: !!python/object/apply:os.getcwd []")


def test_constructor_and_validation_agree() -> None:
    assert ParamPolicy(**GUIDE) == ParamPolicy.model_validate(GUIDE)
    assert ParamPolicy.model_validate(ParamPolicy(**GUIDE)) == ParamPolicy(**GUIDE)
    assert ParamPolicy.model_validate({}) == ParamPolicy()


@pytest.mark.parametrize(
    "policy, message",
    [
        ({"default": {}}, "default: unknown key of the policy.*'defaults'"),
        ({"overrides": [{"nmae": "x", "set": {"route": "muon"}}]}, r"overrides\.0\.nmae: unknown key.*'name'"),
        ({"overrides": [{"name": "x", "set": {"rout": "muon"}}]}, r"overrides\.0\.set\.rout: unknown key.*'route'"),
        ({"overrides": [{"name": "x", "set": {"route": "muno"}}]}, r"overrides\.0\.set\.route: .*'muno'.*'muon'"),
        ({"defaults": {"route": "shared_adamw"}}, r"defaults\.route: .*'sharded_adamw'"),
        ({"defaults": {"param_dtype": "bfloat61"}}, r"defaults\.param_dtype: unknown dtype.*'bfloat16'"),
        ({"defaults": {"param_dtype": torch.int8}}, r"defaults\.param_dtype: must be a floating-point dtype"),
        ({"defaults": {"grad_dtype": 16}}, r"defaults\.grad_dtype: must be a torch dtype"),
        ({"defaults": {"cast_forward_inputs": "yes"}}, r"defaults\.cast_forward_inputs: must be true or false"),
        ({"defaults": ["muon"]}, r"defaults: must be a mapping"),
        ({"overrides": {"name": "x"}}, "overrides: must be a list"),
        ({"overrides": ["norm"]}, r"overrides\.0: must be a mapping"),
        ({"overrides": [{"name": "x", "contains": "y", "set": {"route": "muon"}}]}, "excludes its legacy alias"),
        ({"overrides": [{"name": "", "set": {"route": "muon"}}]}, r"overrides\.0\.name: .*empty"),
        ({"overrides": [{"name": [], "set": {"route": "muon"}}]}, r"overrides\.0\.name: .*at least one token"),
        ({"overrides": [{"name": 3, "set": {"route": "muon"}}]}, r"overrides\.0\.name: must be a string"),
        ({"overrides": [{"name": "x"}]}, r"overrides\.0\.set: is required"),
        ({"overrides": [{"name": "x", "set": {}}]}, r"overrides\.0\.set: must set at least one field"),
        ({"overrides": [{"name": "x", "route": "adamw"}]}, r"overrides\.0\.route: unknown key.*under 'set'"),
        ({"route": "adamw"}, "route: unknown key of the policy.*under 'defaults'"),
        ({"overrides": [{"set": {"route": "adamw"}}]}, r"overrides\.0: an override needs a selector"),
        ({"overrides": [{"regex": "(", "set": {"route": "adamw"}}]}, r"overrides\.0\.regex: .*no regular expression"),
        ({"overrides": [{"role": "embeding", "set": {"route": "adamw"}}]}, r"overrides\.0\.role: .*'embedding'"),
        ("defaults: [", "param_policy: is no valid YAML"),
        ("- norm", "param_policy: must be a mapping"),
    ],
)
def test_bad_policies_name_the_key_and_the_nearest_word(policy: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ParamPolicy.model_validate(policy)
    if isinstance(policy, dict):
        with pytest.raises(OptionError, match=message):
            ParamPolicy(**policy)


@pytest.mark.parametrize("text", ["bfloat16", "bf16", "torch.bfloat16", " BF16 ", torch.bfloat16])
def test_dtype_spellings(text: object) -> None:
    assert parse_dtype(text) is torch.bfloat16


def test_absent_values() -> None:
    assert parse_dtype(None) is None
    assert parse_dtype("none") is None
    assert parse_route("null") is None
    assert PolicyFields(route=None).given() == {"route": None}
    assert PolicyFields().given() == {}


def test_pydantic_is_imported_by_the_schema_alone() -> None:
    code = (
        "import sys, dmuown.policy, dmuown.policy.resolve, dmuown.policy.groups\n"
        "assert 'pydantic' not in sys.modules\n"
        "dmuown.policy.ParamPolicy\n"
        "assert 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
