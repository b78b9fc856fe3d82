"""Run the demo; see `dmuown.automodel.demo`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dmuown.automodel.demo import data, model
from dmuown.automodel.demo.plot import plot_losses
from dmuown.automodel.launch import launch
from dmuown.automodel.summary import RunSummary
from dmuown.commands.quiet import quieten_host
from dmuown.errors import DmuownError, OptionError

CONFIGS = Path(__file__).parents[4] / "configs" / "automodel"
OPTIMIZERS = ("muown", "muon", "adamw")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, answer, train, answer, plot. Returns 0 if both losses fell."""
    parser = argparse.ArgumentParser(prog="python -m dmuown.automodel.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for everything made here")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muown")
    parser.add_argument("--processes", type=int, default=2, help="training processes")
    parser.add_argument("--config", type=Path, help="another recipe than configs/automodel/smollm2_OPTIMIZER.yaml")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of the recipe, --dotted.key=value")
    options = parser.parse_args(arguments)
    quieten_host()
    try:
        return _run(options)
    except DmuownError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    output: Path = options.output.resolve()
    config: Path = options.config or CONFIGS / f"smollm2_{options.optimizer}.yaml"
    if not config.is_file():
        raise OptionError("--config", f"{config} does not exist", "Run the demo from a checkout, or name a recipe")
    output.mkdir(parents=True, exist_ok=True)
    # Nothing is looked up on the network, and caches stay with the demo.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(output / "cache"), "TOKENIZERS_PARALLELISM": "false"}

    files = data.write_data(output / "data")
    print(
        f"data: {files.train_pairs} training and {files.validation_pairs} validation pairs from {data.SOURCE} "
        f"({data.LICENSE}), in {output / 'data'}",
        flush=True,
    )
    print(f"model: {model.NAME} from {model.PACKAGE} ({model.LICENSE}) ...", flush=True)
    base = model.write_model(output / "model")
    question = json.loads(files.validation.read_text(encoding="utf-8").splitlines()[0])
    before = model.answer(base, question["question"])
    print(f"prompt: {question['question']}\nbefore: {before}", flush=True)

    run = output / options.optimizer
    shutil.rmtree(run, ignore_errors=True)  # the host would resume from a checkpoint it finds there
    overrides = [
        f"--model.pretrained_model_name_or_path={base}",
        f"--dataset.path_or_dataset_id={files.train}",
        f"--validation_dataset.path_or_dataset_id={files.validation}",
        f"--checkpoint.checkpoint_dir={run}",
        *options.overrides,
    ]
    print(f"training: {config.name}, {options.processes} processes; starting them takes some seconds ...", flush=True)
    if code := launch(config, overrides, processes=options.processes):
        return code

    summary = RunSummary.load(run)
    picture = plot_losses(summary, run / "losses.png", title=f"{model.NAME}, {summary.optimizer}")
    assert summary.consolidated is not None, "the recipe saves a consolidated checkpoint at its end"
    after = model.answer(Path(summary.consolidated), question["question"])
    print(f"\nprompt: {question['question']}\nbefore: {before}\nafter:  {after}\nanswer: {question['answer']}\n")
    validation = next(iter(summary.validation_losses.values()))
    fell = {"loss": _fell(summary.losses, 5), "validation loss": _fell(validation, 1)}
    print(summary)
    print(f"  plot  {picture}\n  in all {time.perf_counter() - start:.0f} s")
    for name, fallen in fell.items():
        if not fallen:
            print(f"error: the {name} did not fall", file=sys.stderr)
    return 0 if all(fell.values()) else 1


def _fell(losses: dict[int, float], window: int) -> bool:
    """Whether the mean of the last `window` losses is below that of the first."""
    values = [losses[step] for step in sorted(losses)]
    return sum(values[-window:]) < sum(values[:window])


if __name__ == "__main__":
    sys.exit(main())
