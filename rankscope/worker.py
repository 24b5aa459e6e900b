"""Run one rank under any launcher: `trainer.rank.worker`, even if another `trainer` is on the path.

torchrun --standalone --nproc-per-node 4 -m rankscope.worker examples/gpt-demo.toml
"""

from __future__ import annotations

from rankscope.import_names import claim_names

__all__: list[str] = []

if __name__ == "__main__":
    claim_names()
    from trainer.rank.worker import run_and_leave

    run_and_leave()
