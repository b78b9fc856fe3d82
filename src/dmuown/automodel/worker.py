"""One rank of a fine-tuning run: the host's recipe, with progress and a summary."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmuown.automodel import cpu
from dmuown.automodel.dmuon_options import own_options
from dmuown.automodel.grouping import count_matrices
from dmuown.automodel.progress import ProgressReport
from dmuown.automodel.recipe import extend
from dmuown.automodel.request import Request
from dmuown.automodel.summary import RunSummary
from dmuown.policy.fused import count_blocks
from dmuown.policy.splits import ELEMENTWISE


def run(request: Request) -> RunSummary:
    """Run the host's recipe on this rank and return its summary, complete on rank 0, which prints it.

    Without CUDA the host's CPU patches are applied and the process group is gloo. With CUDA the
    backend is the configuration's, NCCL by default.
    """
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config

    patches = cpu.enable()
    if _rank() == 0:
        for patch in patches:
            print(f"without CUDA: {patch.name} {patch.effect}", flush=True)
    cfg = parse_args_and_load_config(str(request.path), argv=list(request.overrides))
    if not torch.cuda.is_available():
        backend = request.get("dist_env.backend", "gloo")
        if backend != "gloo" and _rank() == 0:
            print(f"without CUDA: dist_env.backend is gloo, not {backend}", flush=True)
        cfg.set_by_dotted("dist_env.backend", "gloo")
    if own_options(request.get("optimizer._target_")) and request.get("optimizer.nonfinite") is None:
        cfg.set_by_dotted("optimizer.nonfinite", "raise")
    module, _, name = request.recipe.rpartition(".")
    recipe = _reporting(extend(getattr(importlib.import_module(module), name)))(cfg)
    recipe.setup()
    recipe.run_train_validation_loop()
    summary: RunSummary = recipe.dmuown_summary
    if _rank() == 0:
        _find_checkpoint(summary, request.checkpoint_dir)
        if summary.nothing_done:
            print(f"\n{summary.nothing_done}", flush=True)
            return summary  # what the finished run wrote stays
        request.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        summary.save(request.checkpoint_dir)
        print(f"\n{summary}", flush=True)
    return summary


def _verbose() -> bool:
    return int(os.environ.get("LOGGING_LEVEL", logging.WARNING)) < logging.WARNING


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _reporting(recipe_class: Any) -> Any:
    """Subclass a recipe of the host so that it reports progress and fills a summary."""

    class Reporting(recipe_class):
        def setup(self) -> None:
            super().setup()
            self.dmuown_summary = _describe(self.optimizer, self.model_parts)
            self.dmuown_summary.world_size = self.dist_env.world_size

        def _log_experiment_details(self) -> None:
            if _verbose():  # it prints the whole configuration
                super()._log_experiment_details()

        def run_train_validation_loop(self) -> Any:
            start = time.perf_counter()
            result = super().run_train_validation_loop()
            self.dmuown_summary.seconds = time.perf_counter() - start
            if self.dmuown_owned:
                from dmuown.automodel.ownership import sum_over_owners

                summary = self.dmuown_summary
                summary.orthogonalized = sum_over_owners(summary.orthogonalized, self.model_parts[0])
            return result

        def _make_progress_bar(self, total: int | None = None, initial: int = 0) -> ProgressReport | None:
            if _rank() != 0:
                return None
            if total is None:
                scheduler = getattr(self, "step_scheduler", None)
                total, initial = getattr(scheduler, "max_steps", None), getattr(scheduler, "step", 0)
            self.dmuown_progress = ProgressReport(total, initial)
            return self.dmuown_progress

        def _update_progress_bar(self, pbar: ProgressReport | None, metrics: dict[str, Any]) -> None:
            if pbar is not None:
                pbar.update(metrics)

        def log_train_metrics(self, log_data: Any) -> Any:
            summary = self.dmuown_summary
            summary.losses[int(log_data.step) + 1] = float(log_data.metrics["loss"])
            summary.first_step, summary.last_step = min(summary.losses), max(summary.losses)
            summary.orthogonalized = sum(getattr(optimizer, "orthogonalized", 0) for optimizer in self.optimizer)
            return super().log_train_metrics(log_data)

        def log_val_metrics(self, val_name: str, log_data: Any, metric_logger: Any = None) -> Any:
            loss = float(log_data.metrics["val_loss"])
            self.dmuown_summary.validation_losses.setdefault(val_name, {})[int(log_data.step) + 1] = loss
            if _rank() == 0:
                self.dmuown_progress.validation(val_name, loss)
            return super().log_val_metrics(val_name, log_data, metric_logger)

    Reporting.__name__ = Reporting.__qualname__ = recipe_class.__name__
    return Reporting


def _describe(optimizers: Sequence[torch.optim.Optimizer], parts: Sequence[torch.nn.Module]) -> RunSummary:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # Optimizers that are not ours have no algorithm, and orthogonalize nothing that we know of.
    matrix_groups = [group for group in groups if group.get("algorithm", "adamw") not in ELEMENTWISE]
    return RunSummary(
        optimizer=" and ".join(dict.fromkeys(type(optimizer).__qualname__ for optimizer in optimizers)),
        matrices=count_matrices(matrix_groups),
        matrix_parameters=_elements(matrix_groups),
        blocks=count_blocks(matrix_groups, parts),
        trainable_parameters=_elements(groups),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def _elements(groups: Sequence[dict[str, Any]]) -> int:
    return sum(parameter.numel() for group in groups for parameter in group["params"])


def _find_checkpoint(summary: RunSummary, folder: Path) -> None:
    from nemo_automodel.components.checkpoint.utils import find_latest_checkpoint

    latest = find_latest_checkpoint(folder) if folder.is_dir() else None
    if latest is None:
        return
    summary.checkpoint = str(latest)
    consolidated = Path(latest) / "model" / "consolidated"
    if (consolidated / "config.json").is_file():
        summary.consolidated = str(consolidated)
