"""Hugging Face's Trainer, on a tiny Llama with random weights: nothing is downloaded.

python examples/frameworks/train_huggingface.py
torchrun --standalone --nproc-per-node 2 examples/frameworks/train_huggingface.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rankscope.frameworks.huggingface import RankscopeCallback


class Counting(Dataset):
    """Sequences that count upwards, as vectors; one of them may be NaN."""

    def __init__(self, poison: int) -> None:
        self.vectors = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        self.poison = poison

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + index) % 64
        scale = float("nan") if index == self.poison else 1.0
        return {"inputs_embeds": self.vectors[tokens] * scale, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--poison", type=int, default=-1, help="sequence that is NaN")
    parser.add_argument("--save", default="", help="file for the final parameters")
    args = parser.parse_args()
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        output_dir="checkpoints",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        include_num_input_tokens_seen=True,
    )
    callbacks = [RankscopeCallback()]
    data, held_out = Counting(args.poison), Subset(Counting(-1), range(8))
    trainer = Trainer(
        LlamaForCausalLM(settings), arguments, train_dataset=data, eval_dataset=held_out, callbacks=callbacks
    )
    trainer.train()
    if args.save and trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), args.save)


if __name__ == "__main__":
    main()
