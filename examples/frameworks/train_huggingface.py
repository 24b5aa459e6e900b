"""Hugging Face's Trainer, on a tiny Llama made here: nothing is downloaded.

python examples/frameworks/train_huggingface.py
torchrun --standalone --nproc-per-node 2 examples/frameworks/train_huggingface.py
rankscope analyze runs/latest
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rankscope.frameworks.huggingface import RankscopeCallback


class Counting(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", default="", help="where the final parameters go")
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
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        include_num_input_tokens_seen=True,
    )
    callbacks = [RankscopeCallback()]
    trainer = Trainer(LlamaForCausalLM(settings), arguments, train_dataset=Counting(), callbacks=callbacks)
    trainer.train()
    if args.save and trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), args.save)


if __name__ == "__main__":
    main()
