"""One rank of a training under any launcher: `trainer.worker`, whatever else is called `trainer` where it is started.

torchrun --standalone --nproc-per-node 4 -m rankscope.worker examples/gpt-demo.toml
"""

from __future__ import annotations

from rankscope._rooms import claim_names

__all__: list[str] = []

if __name__ == "__main__":
    claim_names()
    from trainer.worker import run_and_leave

    run_and_leave()
