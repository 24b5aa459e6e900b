"""TRL's GRPO on a tiny Llama with random weights and a small tokenizer: nothing is downloaded.

rankscope run --nproc-per-node 2 examples/frameworks/train_trl.py
rankscope run --nproc-per-node 2 examples/frameworks/train_trl.py --slow 0.3
rankscope analyze runs/latest

The script does not mention Rankscope: TRL names its work other than training, and these names become the phases
generation, reward and log_probs.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"w{number}" for number in range(60)]
SLOW_FROM = 20


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    plain = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds by which rank 1 is slower in its rewards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_slow = os.environ.get("RANK") == "1" and args.slow > 0

    def many_words(completions: list[str], trainer_state: Any, **unused: Any) -> list[float]:
        if is_slow and trainer_state.global_step >= SLOW_FROM:
            time.sleep(args.slow)
        return [float(len(set(text.split()))) for text in completions]

    tokenizer = words()
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    arguments = GRPOConfig(
        output_dir="checkpoints", max_steps=args.steps, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=12, learning_rate=1e-3, beta=0.0, gradient_checkpointing=False, bf16=False,
        logging_steps=10, save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
    )  # fmt: skip
    prompts = [{"prompt": f"{one} {other}"} for one in WORDS[:16] for other in WORDS[:16]]
    trainer = GRPOTrainer(
        LlamaForCausalLM(settings), many_words, args=arguments, train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
