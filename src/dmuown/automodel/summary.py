"""What a run did, in one screen and in one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE_NAME = "summary.json"


@dataclass
class RunSummary:
    """Result of a run, written by rank 0.

    Attributes:
        optimizer: Class of the optimizer.
        matrices: Matrices orthogonalized at each step, over all model parts of this rank; a stack
            of experts counts each of its matrices, a fused weight each of its blocks.
        matrix_parameters: Elements in them.
        trainable_parameters: Elements of all trainable parameters.
        orthogonalized: Matrices that the last step did orthogonalize, counted where it happens.
        first_step, last_step: Steps of this run, counted from 1 (the host's logs count from 0); a
            resumed run starts after the one it resumes.
        losses: Training loss by step.
        validation_losses: Validation loss by step, for each data set of the host.
        checkpoint: Folder of the last checkpoint, None if none was saved.
        consolidated: Folder in it that `transformers` loads, None if it was not exported.
        seconds: Wall time of the training loop.
        world_size: Processes.
        device: "cpu" or "cuda".
        blocks: Weights that are cut into blocks, counted by their blocks, such as `q 32, k 16, v 16`.
    """

    optimizer: str = ""
    matrices: int = 0
    matrix_parameters: int = 0
    trainable_parameters: int = 0
    orthogonalized: int = 0
    first_step: int = 0
    last_step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    validation_losses: dict[str, dict[int, float]] = field(default_factory=dict)
    checkpoint: str | None = None
    consolidated: str | None = None
    seconds: float = 0.0
    world_size: int = 1
    device: str = "cpu"
    blocks: dict[str, int] = field(default_factory=dict)

    @property
    def nothing_done(self) -> str:
        """What to say where the host resumed from a checkpoint that had all steps behind it; else empty."""
        if self.losses or self.checkpoint is None:
            return ""
        return (
            f"nothing to train: {self.checkpoint} has taken all steps. "
            "Raise step_scheduler.max_steps or num_epochs, or set another checkpoint.checkpoint_dir"
        )

    def __str__(self) -> str:
        steps = len(self.losses)
        lines = [
            ("steps", f"{steps} ({self.first_step} to {self.last_step}) in {self.seconds:.1f} s, {self._where()}"),
            ("loss", _first_last(self.losses)),
        ]
        for name, losses in self.validation_losses.items():
            lines.append(("validation loss" + ("" if name == "default" else f" {name}"), _first_last(losses)))
        lines += [
            ("optimizer", self.optimizer),
            (
                "orthogonalized",
                f"{self.matrices} matrices a step ({self.orthogonalized} in the last), {self.matrix_parameters:,} of "
                f"{self.trainable_parameters:,} trainable parameters",
            ),
        ]
        if self.blocks:
            cut = "; ".join(f"{count} of {blocks}" for blocks, count in self.blocks.items())
            lines.append(("fused weights", cut))
        lines.append(("checkpoint", self.checkpoint or "none saved"))
        if self.consolidated:
            lines.append(("for transformers", self.consolidated))
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"  {label:<{width}}  {text}" for label, text in lines)

    def _where(self) -> str:
        return f"{self.world_size} {'process' if self.world_size == 1 else 'processes'} on {self.device}"

    def save(self, folder: Path) -> Path:
        """Write the summary into `folder` and return the file."""
        file = folder / FILE_NAME
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return file

    @classmethod
    def load(cls, folder: Path) -> RunSummary:
        """Read what `save` wrote."""
        data = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        data["losses"] = {int(step): loss for step, loss in data["losses"].items()}
        data["validation_losses"] = {
            name: {int(step): loss for step, loss in losses.items()}
            for name, losses in data["validation_losses"].items()
        }
        return cls(**data)


def _first_last(losses: dict[int, float]) -> str:
    if not losses:
        return "none"
    steps = sorted(losses)
    return f"first {losses[steps[0]]:.4f}, last {losses[steps[-1]]:.4f}"
