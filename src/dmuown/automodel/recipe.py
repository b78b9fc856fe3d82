"""Recipes of the host with what this package adds: health metrics, and the ownership runtime.

`dmuown finetune` extends the recipe of any YAML. Under the host's own command, name the extended one:

    recipe: dmuown.automodel.recipe.FinetuneRecipe

The section `dmuown` of a YAML turns health metrics on; they go wherever the host's metrics go (its JSON log, wandb,
mlflow, comet):

    dmuown: {health: true, health_every_steps: 10, health_layers: false}
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dmuown.automodel.dmuon_options import DMuonOptions

if TYPE_CHECKING:
    FinetuneRecipe: Any  # where `dmuown check` finds the name without importing the host


def extend(recipe_class: Any) -> Any:
    """Return a subclass of a recipe of the host; nothing changes where neither addition is configured.

    A recipe that is extended already is returned as it is: `dmuown finetune` runs files written for the host's own
    command too, and clipping and checkpoints must be wrapped once.
    """
    if getattr(recipe_class, "dmuown_extended", False):
        return recipe_class

    class Extended(recipe_class):
        dmuown_extended = True

        def setup(self) -> None:
            options = self.cfg.optimizer  # builds and checks the configuration, before any work
            self.dmuown_owned = isinstance(options, DMuonOptions)
            with self._dmuown_building(options):
                super().setup()
            if self.dmuown_owned:
                from dmuown.automodel.ownership import clip_before_step

                given: float | None = self.cfg.get("clip_grad_norm.max_norm", None)
                max_norm = 1.0 if given is None else float(given)  # the host's default
                self.max_grad_norm = None
                self.dmuown_norm = clip_before_step(self.optimizer[0], self.model_parts[0], max_norm)
            self.dmuown_health = self._dmuown_monitor()

        def _dmuown_building(self, options: Any) -> Any:
            if not self.dmuown_owned:
                return contextlib.nullcontext()
            from dmuown.automodel.ownership import check_sizes, whole_parameters

            section = self.cfg.get("distributed", None)
            check_sizes(section.to_dict() if hasattr(section, "to_dict") else section)
            return whole_parameters(options)

        def _dmuown_monitor(self) -> Any:
            section = self.cfg.get("dmuown", None)
            if section is None or not section.get("health", False):
                return None
            from dmuown.diagnostics.health import HealthMonitor

            return HealthMonitor(
                self.optimizer,
                every=int(section.get("health_every_steps", 1)),
                layers=bool(section.get("health_layers", False)),
            )

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            # The first use of the checkpointer after the optimizer is there, at the end of setup.
            if self.dmuown_owned:
                from dmuown.automodel.ownership import wrap_checkpointer

                wrap_checkpointer(self.checkpointer, self.model_parts[0])
            return super().load_checkpoint(*args, **kwargs)

        def log_train_metrics(self, log_data: Any) -> Any:
            if self.dmuown_owned and self.dmuown_norm:
                log_data.metrics["grad_norm"] = float(self.dmuown_norm[0])
            if self.dmuown_health is not None:
                log_data.metrics.update(self.dmuown_health.collect())
            return super().log_train_metrics(log_data)

    Extended.__name__ = Extended.__qualname__ = recipe_class.__name__
    return Extended


def __getattr__(name: str) -> Any:
    if name != "FinetuneRecipe":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    return extend(TrainFinetuneRecipeForNextTokenPrediction)
