"""The model's section: what it loads, from where, and which of its modules are frozen."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmuown.automodel.checks.document import Document, parallel_size, with_variables
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.checks.rules import Rule, any_value, dtype, either, mapping, one_of, optional, switch, text
from dmuown.automodel.shapes import FAMILIES, find_model_config, model_parameters, read_model_config
from dmuown.errors import OptionError
from dmuown.policy.names import nearest
from dmuown.policy.roles import ParameterRole

NAME = "model.pretrained_model_name_or_path"

_ATTENTION = one_of(
    "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "te", "magi"
)


def _kernel_of_the_hub(key: str, value: Any) -> Any:
    if isinstance(value, str) and "/" in value:
        return value
    raise OptionError(key, "names no kernel of the hub")


def attention(key: str, value: Any) -> Any:
    """Take the name of an attention implementation, or of a kernel on the hub (`owner/name`)."""
    try:
        return _kernel_of_the_hub(key, value)
    except OptionError:
        return _ATTENTION(key, value)


VALUES: Mapping[str, Rule] = {
    "pretrained_model_name_or_path": text,
    "torch_dtype": either("a floating-point dtype or auto", one_of("auto"), dtype),
    "dtype": either("a floating-point dtype or auto", one_of("auto"), dtype),
    "attn_implementation": optional(attention),
    "use_liger_kernel": switch,
    "use_sdpa_patching": switch,
    "force_hf": switch,
    "trust_remote_code": switch,
    "revision": optional(text),
    "cache_dir": optional(text),
    "local_files_only": switch,
    "low_cpu_mem_usage": switch,
    "use_cache": switch,
    "subfolder": text,
    "variant": optional(text),
    "use_safetensors": optional(switch),
    "token": any_value,
    "backend": optional(mapping),
    "config": any_value,
    "device_map": any_value,
    "num_labels": any_value,
    "quantization_config": any_value,
    "sdpa_method": any_value,
    "text_config": any_value,
}
"""Keys of `from_pretrained` and `from_config` of the host and of transformers, with the rule of each."""


def check_model(document: Document, report: Report, *, model_config: Path | None = None) -> list[ParameterRole] | None:
    """Check the model's folder, and return its parameters where its `config.json` is here and its family known."""
    named = (
        document.get(NAME) or document.get("model.config.pretrained_model_name_or_path") or document.get("model.config")
    )
    key = NAME if document.has(NAME) else "model.config"
    if model_config is None and isinstance(named, str):
        named = with_variables(named)
        if is_path(named) and not Path(named).expanduser().exists():
            report.error(key, f"{named!r} does not exist", "Give the folder of a checkpoint, or a name on the hub")
            return None
        model_config = find_model_config(named)
        if model_config is None and Path(named).expanduser().is_dir():
            report.error(key, f"{named!r} holds no config.json", "Give the folder of a checkpoint")
            return None
    if model_config is None:
        return None
    try:
        content = read_model_config(model_config)
    except OptionError as error:
        report.error(key, error.rule, error.remedy)
        return None
    _check_weights(document, model_config.parent, report, key)
    if content.get("model_type") not in FAMILIES:
        return None
    _check_heads(document, content, report)
    try:
        return model_parameters(
            content, where=str(model_config), host_layout=not document.get("model.force_hf", default=False)
        )
    except OptionError as error:
        report.error(key, f"{error.subject} {error.rule}", error.remedy)
        return None


def check_model_keys(document: Document, report: Report, taken: Mapping[str, Any]) -> None:
    """Check the keys of the model's section: those of its target, those of transformers, those of the checkpoint."""
    section = document.get("model")
    named = document.get(NAME)
    found = find_model_config(with_variables(named)) if isinstance(named, str) else None
    own: set[str] = set()
    if found is not None:
        try:
            own = set(json.loads(found.read_text(encoding="utf-8")))
        except (ValueError, OSError):
            own = set()
    known = {*taken, *VALUES, *own, "_target_"}
    for key, value in section.items():
        dotted = f"model.{key}"
        if key in VALUES:
            try:
                VALUES[key](dotted, value)
            except OptionError as error:
                report.raised(error)
        elif key not in known:
            report.error(
                dotted,
                "is no argument of the model's loader, and no key of the checkpoint's config.json",
                nearest(key, {*taken, *VALUES}),
            )


def check_frozen(document: Document, report: Report, parameters: list[ParameterRole] | None) -> None:
    """Check the selectors of `freeze_config`: their form, and that each selects something."""
    names = [] if parameters is None else [entry.name for entry in parameters]
    paths = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
    for field in ("freeze_modules", "unfreeze_modules"):
        for index, entry in enumerate(document.get(f"freeze_config.{field}") or []):
            key = f"freeze_config.{field}[{index}]"
            if not isinstance(entry, Mapping):
                continue
            if len(entry) != 1 or not set(entry) <= {"path", "glob"}:
                wrong = next((name for name in entry if name not in ("path", "glob")), None)
                report.error(
                    key if wrong is None else f"{key}.{wrong}",
                    f"must be either path or glob, got {dict(entry)!r}",
                    "Write - path: model.layers.0",
                )
                continue
            (kind, value), *_ = entry.items()
            if not isinstance(value, str) or not value:
                report.error(f"{key}.{kind}", f"must be the name of a module, got {value!r}", "Write it as text")
            elif paths and not (
                value in paths if kind == "path" else any(fnmatch.fnmatch(path, value) for path in paths)
            ):
                remedy = nearest(value, paths) if kind == "path" else "Write a pattern of module names"
                report.error(f"{key}.{kind}", f"{value!r} matches no module of the model", remedy)


#: Keys of the section `distributed.pipeline` that split the model otherwise than evenly over the ranks.
_OWN_SPLIT = ("layers_per_stage", "module_fqns_per_model_part", "pp_schedule_csv")
#: Schedules with one stage a rank; the others have two.
_ONE_STAGE = ("1f1b", "gpipe")


def check_stages(
    document: Document, report: Report, parameters: list[ParameterRole] | None, *, own_optimizer: bool
) -> None:
    """Check the pipeline's stages: that each has a layer, and something to train where an optimizer is built of each.

    Args:
        document: The YAML.
        report: Where to report.
        parameters: The model's, if they are known.
        own_optimizer: Whether the optimizer is one of ours, which refuses a stage that is frozen altogether.
    """
    count = parallel_size(document, "pp_size")
    if parameters is None or count == 1:
        return
    pipeline = document.get("distributed.pipeline")
    given = pipeline if isinstance(pipeline, Mapping) else {}
    schedule = given.get("pp_schedule")
    if any(given.get(key) is not None for key in _OWN_SPLIT) or (schedule and str(schedule).lower() not in _ONE_STAGE):
        return  # how many stages there are, and of what, is not known here
    from dmuown.automodel.planned.cluster import stages
    from dmuown.automodel.planned.model import trainable_flags

    try:
        parts = stages(parameters, count)
    except OptionError as error:
        report.error("distributed.pp_size", error.rule, error.remedy)
        return
    if not own_optimizer or document.get("peft") is not None or report.has_error("freeze_config"):
        return
    flags = trainable_flags(document, parameters)
    trained = {entry.name for entry, flag in zip(parameters, flags, strict=True) if flag}
    frozen = [index for index, part in enumerate(parts) if not any(entry.name in trained for entry in part)]
    if frozen:
        report.error(
            "distributed.pp_size",
            f"{count} stages leave stage {frozen[0]} nothing to train: all of it is frozen by freeze_config",
            "Lower it, or unfreeze some of it",
        )


def _check_heads(document: Document, content: Mapping[str, Any], report: Report) -> None:
    """Under fsdp2 the host cuts attention between heads only; of queries there are multiples of those of keys."""
    if document.get("distributed.strategy", "fsdp2") != "fsdp2":
        return
    key = "num_key_value_heads" if content.get("num_key_value_heads") else "num_attention_heads"
    ranks, heads = parallel_size(document, "tp_size"), content.get(key)
    if isinstance(heads, int) and heads % ranks:
        rule = f"{ranks} does not divide the model's {heads} {key}"
        report.error("distributed.tp_size", rule, "Give a size that divides them")


def is_path(value: str) -> bool:
    """Whether a name is meant as a path, not as a name on the hub."""
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or value.endswith((".json", ".jsonl"))


def _check_weights(document: Document, folder: Path, report: Report, key: str) -> None:
    """A checkpoint folder without weights cannot be loaded from."""
    target = str(document.get("model._target_") or "")
    named = Path(with_variables(str(document.get(NAME)))).expanduser()
    if not target.endswith("from_pretrained") or not named.is_dir():
        return
    weights = [file for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(pattern)]
    if not weights:
        report.error(key, f"{str(folder)!r} holds no weights (*.safetensors)", "Give the folder of a checkpoint")
