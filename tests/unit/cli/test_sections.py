"""The table of the host's sections has the keys of the installed host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dmuown.automodel.checks import sections
from dmuown.automodel.checks.targets import find_target, fits

pytest.importorskip("nemo_automodel", reason="the host is not installed")

HOST = "nemo_automodel.components"
# Read by the recipe itself, beside the dataclass.
EXTRA = {
    "STEP_SCHEDULER": {"local_batch_size", "dp_size", "dataloader"},
    "CHECKPOINT": {"restore_from"},
}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("STEP_SCHEDULER", f"{HOST}.training.step_scheduler.StepSchedulerConfig"),
        ("LR_SCHEDULER", f"{HOST}.optim.optimizer.LRSchedulerConfig"),
        ("CHECKPOINT", f"{HOST}.checkpoint.config.CheckpointingConfig"),
        ("MLFLOW", f"{HOST}.loggers.loggers.MLflowConfig"),
        ("COMET", f"{HOST}.loggers.loggers.CometConfig"),
        ("MP_POLICY", "torch.distributed.fsdp.MixedPrecisionPolicy"),
        ("MOE", f"{HOST}.distributed.config.MoEParallelizerConfig"),
    ],
)
def test_keys_are_the_hosts(name: str, target: str) -> None:
    table: Mapping[str, Any] = getattr(sections, name)
    found = find_target(target)
    assert found.status == "found"
    assert set(table) - EXTRA.get(name, set()) - {"_target_"} == set(found.arguments)


@pytest.mark.parametrize(
    ("strategy", "target"), [("fsdp2", "FSDP2Config"), ("megatron_fsdp", "MegatronFSDPConfig"), ("ddp", "DDPConfig")]
)
def test_keys_of_strategies_are_the_hosts(strategy: str, target: str) -> None:
    found = find_target(f"{HOST}.distributed.config.{target}")
    own = set(sections.STRATEGIES[strategy]) - set(sections.PARALLEL_SIZES)
    assert own - {"_target_", "strategy", "pipeline", "moe"} == set(found.arguments)


def test_signatures_are_read_through_reexports_and_bases() -> None:
    loader = find_target("nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained")
    assert loader.status == "found"
    assert loader.takes_any
    assert loader.arguments["pretrained_model_name_or_path"].required
    assert not loader.arguments["torch_dtype"].required
    assert find_target("nemo_automodel.NeMoAutoModelForCausalL.from_pretrained").status == "missing"
    assert find_target("no_such_package_anywhere.Thing").status == "unknown"
    data = find_target(f"{HOST}.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset")
    assert not data.takes_any
    mask = data.arguments["answer_only_loss_mask"].annotation
    assert fits(True, mask)
    assert not fits(1, mask)
    path = data.arguments["path_or_dataset_id"].annotation
    assert fits("x", path)
    assert fits(["x"], path)
    assert not fits([1], path)
    assert fits(None, data.arguments["seq_length"].annotation)
