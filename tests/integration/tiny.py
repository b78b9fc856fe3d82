"""A tiny Llama checkpoint, a tiny data set and a recipe over both, made from nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from dmuown.automodel.summary import RunSummary

ROOT = Path(__file__).parents[2]

#: Linear layers in the tiny model: 2 blocks of q, k, v, o, gate, up, down.
MATRICES = 14


def write_checkpoint(folder: Path, *, tied: bool = False) -> None:
    """Write a Llama of two blocks with random weights, and a tokenizer whose tokens are characters."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def write_data(file: Path, numbers: range) -> None:
    """Write sums of small numbers as questions and answers."""
    rows = [{"question": f"What is {n} plus {n % 7}?", "answer": f"It is {n + n % 7}."} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe(assets: Path, checkpoint_dir: Path, **optimizer: Any) -> dict[str, Any]:
    """Return the recipe: 6 steps of 8 samples, a validation and a checkpoint after each three."""

    def data(name: str) -> dict[str, Any]:
        target = "column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
        return {
            "_target_": f"nemo_automodel.components.datasets.llm.{target}",
            "path_or_dataset_id": str(assets / name),
            "column_mapping": {"question": "question", "answer": "answer"},
        }

    loader = {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
    }
    return {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "seed": 1234,
        "step_scheduler": {
            "global_batch_size": 8,
            "local_batch_size": 4,
            "max_steps": 6,
            "num_epochs": 1,
            "ckpt_every_steps": 3,
            "val_every_steps": 3,
        },
        "dist_env": {"timeout_minutes": 2},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": str(assets / "model"),
            "torch_dtype": "float32",
            "attn_implementation": "sdpa",
            "use_liger_kernel": False,
            "force_hf": True,
        },
        "distributed": {
            "strategy": "fsdp2",
            "dp_size": "none",
            "tp_size": 1,
            "cp_size": 1,
            "mp_policy": {
                "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
                "param_dtype": "float32",
                "reduce_dtype": "float32",
                "cast_forward_inputs": False,
            },
        },
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": data("train.jsonl"),
        "validation_dataset": data("validation.jsonl"),
        "packed_sequence": {"packed_sequence_size": 0},
        "dataloader": loader | {"shuffle": True},
        "validation_dataloader": dict(loader),
        "optimizer": {"_target_": "dmuown.automodel.MuownConfig", "lr": 2e-2, "weight_decay": 0.01} | optimizer,
        "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 2},
        "clip_grad_norm": {"max_norm": 1.0},
        "checkpoint": {
            "enabled": True,
            "checkpoint_dir": str(checkpoint_dir),
            "model_save_format": "safetensors",
            "save_consolidated": "final",
        },
    }


def write_recipe(file: Path, content: dict[str, Any]) -> Path:
    """Write a recipe as YAML."""
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def write_assets(folder: Path) -> Path:
    """Write the checkpoint as `model`, and data to train and to validate with."""
    write_checkpoint(folder / "model")
    write_data(folder / "train.jsonl", range(200))
    write_data(folder / "validation.jsonl", range(200, 216))
    return folder


class Run(NamedTuple):
    """A run that came to its end: where it wrote, its summary, and the host's log, one entry a step."""

    folder: Path
    summary: RunSummary
    log: list[dict[str, Any]]

    def column(self, key: str) -> list[float]:
        """One value of every step."""
        return [record[key] for record in self.log]


def finetune(
    assets: Path, name: str, config: str, *arguments: str, processes: int, peft: dict[str, Any] | None = None
) -> Run:
    """Fine-tune with a configuration of ours, health metrics logged, by `dmuown finetune`.

    Args:
        assets: What `write_assets` wrote.
        name: Of the run, and of the folder below `assets` that it writes to.
        config: Name in `dmuown.automodel`.
        arguments: Further ones of the command.
        processes: How many.
        peft: Section of adapters.
    """
    from dmuown.automodel.summary import RunSummary

    folder = assets / name
    content = recipe(assets, folder) | ({} if peft is None else {"peft": peft})
    content["optimizer"]["_target_"] = f"dmuown.automodel.{config}"
    content["dmuown"] = {"health": True}
    file = write_recipe(assets / f"{name}.yaml", content)
    done = dmuown("finetune", str(file), "--nproc-per-node", str(processes), *arguments, cwd=assets, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    return Run(folder, RunSummary.load(folder), log)


def dmuown(*arguments: str, timeout: float = 120, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, in a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_DATASETS_CACHE": os.environ.get("HF_DATASETS_CACHE", str((cwd or ROOT / "runs") / "hf-cache")),
    }
    return run_group([sys.executable, "-m", "dmuown.cli", *arguments], timeout=timeout, cwd=cwd, env=environment)


def run_group(
    command: list[str], *, timeout: float, patience: float = 10, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and end everything that it started with it: a launcher that is killed alone leaves its ranks.

    Args:
        command: What to run, in a session of its own.
        timeout: Seconds until its process group gets SIGTERM.
        patience: Seconds from there to SIGKILL.
        options: Of `subprocess.Popen`.

    Raises:
        TimeoutExpired: It ran longer; its output up to then is part of the error.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, not pipes: a rank that outlives the launcher would keep a pipe open, and reading it would wait for it.
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True, start_new_session=True, **options)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            late.output = _read(out) + _read(err)
            raise
        finally:
            _end_group(process, patience)
        return subprocess.CompletedProcess(command, code, _read(out), _read(err))


def _end_group(process: subprocess.Popen[str], patience: float) -> None:
    """SIGTERM to the group, SIGKILL to what is left of it after a while, and to what torchrun put in other sessions."""
    elsewhere = _descendants(process.pid) if process.poll() is None else {}
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break  # nothing is left
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _group_is_alive(process):
            time.sleep(0.02)
    deadline = time.monotonic() + patience
    for number, begun in elsewhere.items():
        if _begun(number) == begun:  # still the same process
            os.kill(number, signal.SIGKILL)
    while time.monotonic() < deadline and any(_begun(number) == begun for number, begun in elsewhere.items()):
        time.sleep(0.02)
    process.wait()


def _descendants(number: int) -> dict[int, str]:
    """Processes below one, with the times at which they began; none where there is no /proc."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
    found = [number]
    for parent in found:
        found += [child for child, own in parents.items() if own == parent]
    return {child: begun for child in found[1:] if (begun := _begun(child))}


def _begun(number: int) -> str:
    """When a process began; "" once it has ended, be it reaped or not."""
    try:
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]


def _group_is_alive(process: subprocess.Popen[str]) -> bool:
    process.poll()  # reaps the leader, which would count as alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
