"""Write what examples/automodel/muown.yaml reads: a tiny Llama with random weights, and sums of small numbers.

    python examples/automodel/prepare.py

Everything lands in runs/example. For a model of your own, change the two paths in the YAML instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dmuown.commands.quiet import quieten_host


def main() -> None:
    """Write model, tokenizer and data."""
    parser = argparse.ArgumentParser(description="Write a tiny model and tiny data.")
    parser.add_argument("--folder", type=Path, default=Path("runs/example"))
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    # Before transformers, which imports torchao, and that tells of kernels for other machines.
    quieten_host()
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # One token per printable character.
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")

    for name, numbers in (("train", range(160)), ("validation", range(200, 216))):
        rows = [{"question": f"{n} plus {n % 7}?", "answer": f"{n + n % 7}."} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
