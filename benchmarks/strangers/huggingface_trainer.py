"""Hugging Face Trainer on a tiny causal language model.

torchrun --nproc-per-node 2 huggingface_trainer.py
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = (torch.arange(32) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main():
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=int(os.environ.get("STEPS", "300")),
        learning_rate=1e-3, logging_steps=50, report_to=[], use_cpu=True, save_strategy="no", ddp_backend="gloo",
    )  # fmt: skip
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
