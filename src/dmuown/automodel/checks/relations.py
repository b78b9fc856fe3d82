"""Keys that must agree with each other, and values that the host would take in silence."""

from __future__ import annotations

from typing import Any

from dmuown.automodel.checks.document import Document, parallel_size
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.checks.restore import KEY as RESTORE
from dmuown.automodel.checks.restore import check_algorithm, named_checkpoint
from dmuown.automodel.checks.sections import DEFAULTS
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.errors import CheckpointError

#: Sizes that the host refuses beside a strategy.
_ONLY_ONE = {
    "ddp": ("tp_size", "pp_size", "cp_size", "ep_size", "dp_replicate_size"),
    "megatron_fsdp": ("pp_size", "ep_size", "dp_replicate_size"),
}


def check_relations(
    document: Document, report: Report, options: MatrixOptions | None, *, world_size: int | None = None
) -> None:
    """Check what no single key shows."""
    model_parallel = (
        parallel_size(document, "tp_size") * parallel_size(document, "pp_size") * parallel_size(document, "cp_size")
    )
    check_batches(document, report, max(1, (world_size or 1) // model_parallel))
    _sizes(document, report, world_size)
    _schedule(document, report, options)
    _validation(document, report)
    _loading(document, report)
    _defaults(document, report)


def _number(document: Document, report: Report, key: str) -> Any:
    """A checked number, or None where there is none or it is wrong."""
    value = document.get(key)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and not report.has_error(key)
    return value if usable else None


def check_batches(document: Document, report: Report, ranks: int) -> None:
    """Check that a number of data-parallel ranks can share a step's samples."""
    whole = _number(document, report, "step_scheduler.global_batch_size") or 32
    local = _number(document, report, "step_scheduler.local_batch_size") or 1
    if document.has("step_scheduler") and whole % (local * ranks):
        what = f"{local} (local_batch_size)" + (f" x {ranks} data-parallel ranks" if ranks > 1 else "")
        key = "global_batch_size" if document.has("step_scheduler.global_batch_size") else "local_batch_size"
        report.error(f"step_scheduler.{key}", f"{whole} is no multiple of {what}", "Make it one")


def _sizes(document: Document, report: Report, world_size: int | None) -> None:
    strategy = document.get("distributed.strategy", "fsdp2")
    sizes = {name: parallel_size(document, name) for name in ("tp_size", "pp_size", "cp_size", "ep_size", "dp_size")}
    for name in _ONLY_ONE.get(strategy, ()) if isinstance(strategy, str) else ():
        if (size := parallel_size(document, name)) > 1:
            report.error(f"distributed.{name}", f"must be 1 with strategy {strategy}, got {size}", "Use fsdp2")
    if sizes["pp_size"] > 1 and not document.has("distributed.pipeline"):
        report.error(
            "distributed.pp_size", "needs a section distributed.pipeline", "Write pipeline: {} for its defaults"
        )
    if document.get("distributed.activation_checkpointing") == "selective" and strategy == "megatron_fsdp":
        report.error("distributed.activation_checkpointing", "selective needs fsdp2 or ddp", "Write true or false")
    if world_size is None:
        return
    model_parallel = sizes["tp_size"] * sizes["pp_size"] * sizes["cp_size"]
    if world_size % model_parallel:
        key = next(name for name in ("tp_size", "pp_size", "cp_size") if sizes[name] > 1)
        report.error(
            f"distributed.{key}",
            f"tp_size x pp_size x cp_size = {model_parallel} does not divide {world_size} processes",
            "Change a size or the number of processes",
        )
        return
    data_parallel = world_size // model_parallel
    if document.get("distributed.dp_size") is not None and sizes["dp_size"] != data_parallel:
        report.error(
            "distributed.dp_size",
            f"must be {data_parallel} for {world_size} processes, got {sizes['dp_size']}",
            "Write none",
        )
    replicas = parallel_size(document, "dp_replicate_size")
    if data_parallel % replicas:
        report.error("distributed.dp_replicate_size", f"{replicas} does not divide {data_parallel} data-parallel ranks")
    elif replicas == data_parallel > 1:
        report.error(
            "distributed.dp_replicate_size",
            f"must be less than the {data_parallel} data-parallel ranks, got {replicas}: FSDP2 needs two shards",
            "Lower it, or use strategy ddp",
        )
    stage = world_size // sizes["pp_size"]
    if stage % sizes["ep_size"]:
        report.error("distributed.ep_size", f"{sizes['ep_size']} does not divide {stage} ranks")


def _schedule(document: Document, report: Report, options: MatrixOptions | None) -> None:
    steps = _number(document, report, "step_scheduler.max_steps")
    endless = steps is None and document.get("step_scheduler.num_epochs") is None
    if document.has("step_scheduler") and endless and not report.has_error("step_scheduler"):
        report.warning(
            "step_scheduler.max_steps", "and num_epochs are not set: the host trains for 10 epochs", "Set one of them"
        )
    if not document.has("lr_scheduler"):
        return
    warmup = _number(document, report, "lr_scheduler.lr_warmup_steps")
    decay = _number(document, report, "lr_scheduler.lr_decay_steps") or steps
    if warmup is not None and decay is not None and warmup >= decay:
        report.error(
            "lr_scheduler.lr_warmup_steps", f"must be below the {decay} steps of the schedule, got {warmup}", "Lower it"
        )
    base = options.lr if options is not None else _number(document, report, "optimizer.lr")
    peak = _number(document, report, "lr_scheduler.max_lr")
    least = _number(document, report, "lr_scheduler.min_lr")
    if peak is not None and base is not None and peak != base:
        report.warning(
            "lr_scheduler.max_lr",
            f"is {peak} and optimizer.lr is {base}: the schedule peaks at max_lr",
            "Set them alike",
        )
    top = peak if peak is not None else base
    if least is not None and top is not None and least > top:
        report.error("lr_scheduler.min_lr", f"must be at most the peak {top}, got {least}", "Lower it")
    first = _number(document, report, "lr_scheduler.init_lr")
    if first is not None and top is not None and first > top:
        report.error("lr_scheduler.init_lr", f"must be at most the peak {top}, got {first}", "Lower it")
    if base == 0:
        report.error("optimizer.lr", "is 0, from which the host's schedule cannot scale the groups", "Give a rate > 0")
    if document.get("lr_scheduler.lr_decay_style") == "WSD" and document.get("lr_scheduler.wsd_decay_steps") is None:
        report.error(
            "lr_scheduler.wsd_decay_steps", "is needed with lr_decay_style WSD", "Give the steps of the last phase"
        )
    start, end = (_number(document, report, f"lr_scheduler.{key}") for key in ("start_wd", "end_wd"))
    if start is not None and end is not None and start > end:
        report.error("lr_scheduler.start_wd", f"must be at most end_wd {end}, got {start}", "Swap them")


def _validation(document: Document, report: Report) -> None:
    every = document.get("step_scheduler.val_every_steps")
    sets = [name for name in document.config if name.startswith("validation_dataset")]
    if every is not None and not sets and not report.has_error("step_scheduler.val_every_steps"):
        report.warning("step_scheduler.val_every_steps", "has no validation_dataset to run on", "Add one, or remove it")
    if sets and every is None:
        report.warning(
            "step_scheduler.val_every_steps", f"is not set: {sets[0]} is used at checkpoints only", "Set it to validate"
        )
    if sets and not document.has("validation_dataloader"):
        report.default("validation_dataloader", "the defaults of a data loader", "Write one")
    steps = _number(document, report, "step_scheduler.max_steps")
    value = _number(document, report, "step_scheduler.val_every_steps")
    if steps is not None and value is not None and value > steps:
        report.warning(
            "step_scheduler.val_every_steps", f"{value} is above max_steps {steps}: never reached", "Lower it"
        )


def _loading(document: Document, report: Report) -> None:
    if document.get("model.force_hf") is True and document.get("model.backend") is not None:
        report.error("model.backend", "has no effect on transformers' own class: force_hf is true", "Keep one of them")
    restore = document.get(RESTORE)
    if restore is not None and document.get("checkpoint.enabled") is False:
        report.error(RESTORE, "needs checkpoint.enabled: true", "Enable checkpoints, or remove it")
    elif isinstance(restore, str) and not report.has_error("checkpoint"):
        _restored(document, report)
    if document.get("checkpoint.save_consolidated") not in (None, False, "false") and (
        document.get("checkpoint.model_save_format") == "torch_save"
    ):
        report.warning(
            "checkpoint.save_consolidated", "is ignored with model_save_format torch_save", "Use safetensors"
        )
    packed = document.get("packed_sequence")
    if isinstance(packed, dict) and packed.get("packed_sequence_size", 0) == 0:
        given = [key for key in packed if key != "packed_sequence_size"]
        if given:
            report.warning(f"packed_sequence.{given[0]}", "has no effect: packed_sequence_size is 0", "Set the size")
    dropped = document.get("peft.dropout")
    if document.has("peft") and document.has("freeze_config") and dropped is None:
        report.warning("freeze_config", "is beside peft, which freezes all but the adapters", "Remove it if not meant")


def _restored(document: Document, report: Report) -> None:
    try:
        folder = named_checkpoint(document.config)
    except CheckpointError as error:
        report.raised(error)
        return
    try:
        if folder is not None:
            check_algorithm(folder, document.config)
    except CheckpointError as error:
        report.error(RESTORE, f"{error.subject!r} {error.rule}", error.remedy)


def _defaults(document: Document, report: Report) -> None:
    for key, default in DEFAULTS.items():
        section, _, name = key.partition(".")
        if name and not isinstance(document.get(section), dict):
            continue
        if not document.has(key) and not report.has_error(section):
            report.default(key, default, "Write it")
