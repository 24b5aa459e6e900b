"""Hugging Face's Trainer with FSDP2, on a tiny Llama with random weights: nothing is downloaded.

rankscope run --nproc-per-node 2 examples/frameworks/train_huggingface_fsdp.py
rankscope analyze runs/latest

The script does not mention Rankscope. Accelerate shards only on accelerators; without a GPU the script makes it believe
that there are some, so that the same code runs over gloo.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Counting(Dataset):
    """Sequences of tokens that count upwards."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    settings = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        output_dir="checkpoints", max_steps=args.steps, per_device_train_batch_size=4, learning_rate=1e-3,
        logging_steps=10, save_strategy="no", report_to=[], use_cpu=on_cpu, disable_tqdm=True,
        accelerator_config={"use_configured_state": on_cpu},
        fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    Trainer(LlamaForCausalLM(settings), arguments, train_dataset=Counting()).train()


if __name__ == "__main__":
    main()
