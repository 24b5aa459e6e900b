"""One process's part in replaying a step of a finished run: load the state, repeat the updates before the step, and
replay the step.

    result = replay_target(config, plan, target, device, report=print)   # events `replay`, as a run's triage writes

1. The checkpoint is read (hashes first), or the initial state is made.
2. If this state is older than the state before the step, the step's batch is also replayed on the older state. A fault
   that recurs there is caused by the batch.
3. The updates in between are repeated with the recorded batches and learning rates.
4. The step is replayed with every operation watched. Its update is not taken.

With as many ranks as the run had, all of them do this together. Replicas without any sharding (DDP) need only one
process. It computes the data ranks' shares one after the other, and averages the gradients. The average may then differ
in the last bits. Nothing is written into the run's folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from probes.guard.decisions import Verdict
from trainer.checkpoint.continuity import data_differs
from trainer.checkpoint.disk_tier.loading import load_folder
from trainer.config.config import Config
from trainer.data.batches import Batch
from trainer.layout.plan import Plan
from trainer.replay.target import Target, Update
from trainer.replay.triage import Replay, findings, is_reproduced
from trainer.replay.triage import replay as replay_once
from trainer.training.build import build
from trainer.training.optimizer import learning_rate
from trainer.training.rank_training import Training

__all__ = ["ProcessReplay", "replay_target", "runs_in_one_process"]

MAX_OVERFLOWS = 32
"""Maximum number of consecutive steps that are dropped in fp16 until the loss scale is low enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share(Plan):
    """Plan of a process that stands for one data rank after the other."""

    num_shares: int
    share: int = 0

    @property
    def data_size(self) -> int:
        return self.num_shares

    def data_rank(self, rank: int) -> int:
        return self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReplay:
    """Result of one process. `events`: details of the `replay` events, with their ranks."""

    events: list[dict[str, Any]]
    max_loss_deviation_ratio: float | None
    """Largest relative difference between the recomputed and the recorded loss of earlier steps; None if no loss was
    compared."""
    data_differs: bool
    """True if the data differ from the data with which the checkpoint was saved."""


def runs_in_one_process(plan: Plan) -> bool:
    """True if each data rank has the whole model."""
    return plan.world_size == plan.dp_replicate  # replicas only


def replay_target(
    config: Config,
    plan: Plan,
    target: Target,
    device: torch.device,
    *,
    losses: dict[int, float] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> ProcessReplay:
    """Replay the target. `losses`: recorded losses by step, to be compared with the recomputed losses.

    Collective if the process group is initialised. If it is not, `plan` must run in one process. Raises CheckpointError
    or ConfigError.
    """
    if torch.distributed.is_initialized():
        training, ranks = build(config, plan, device, with_weights=False), None
    else:
        one = _Share(
            **{name: getattr(plan, name) for name in ("local_batch_size", "micro_batch_size", "stages", "schedule")},
            world_size=1, pp=1, dp_replicate=1, dp_shard=1, ep=1, cp=1, tp=1, num_shares=plan.data_size,
        )  # fmt: skip
        training, ranks = build(config, one, device, with_weights=False), list(range(plan.data_size))
    with _closing(training):
        return _StepReplayer(training, target, ranks, report).run(losses or {})


@contextmanager
def _closing(training: Training) -> Iterator[None]:
    try:
        yield
    finally:
        training.close()


class _StepReplayer:
    """Replays one target. `ranks`: the ranks that this process stands for; None: only its own."""

    def __init__(
        self, training: Training, target: Target, ranks: list[int] | None, report: Callable[[str], None]
    ) -> None:
        self.training = training
        self.target = target
        self.ranks = ranks
        self.report = report
        self._optim = training.config.optim
        verdict = target.kind if target.kind != "healthy" else "non_finite"
        self.verdict = Verdict(step=target.step, kind=verdict, loss=target.loss, loss_level=target.loss_level)

    def run(self, losses: dict[int, float]) -> ProcessReplay:
        target, differs, worst = self.target, False, None
        if target.checkpoint:
            loaded = load_folder(Path(target.checkpoint), self.training)
            if self.training.scaler is not None and loaded.values.scaler is not None:
                self.training.scaler.load(dict(loaded.values.scaler))
            differs = data_differs(loaded.extra, self.training.stream, loaded.values.position)
        else:
            self.training.fill_weights()
        events = []
        if target.updates and target.kind != "healthy":
            self.report(f"Replaying batch {target.batch_index} on the state of step {target.state_step}")
            events += self._replayed("restored", target.state_step)
        for number, update in enumerate(target.updates, start=1):
            loss = self._take(update)
            if (recorded := losses.get(update.step)) and math.isfinite(recorded):
                worst = max(worst or 0.0, abs(loss / recorded - 1.0))
            if number % 10 == 0 or number == len(target.updates):
                self.report(f"Recomputed step {update.step} ({number} of {len(target.updates)}): loss {loss:.4f}")
        self.report(f"Replaying step {target.step} with every operation watched")
        return ProcessReplay(
            events=[*self._replayed("same", target.step - 1), *events],
            max_loss_deviation_ratio=worst,
            data_differs=differs,
        )

    # The step itself.

    def _replayed(self, state: Literal["same", "restored"], state_step: int) -> list[dict[str, Any]]:
        """Replay the step; returns one event for each rank that this process stands for."""
        whole = None if self.ranks is None else self._whole(self.target.batch_index)
        events = []
        for rank in [self.training.rank] if self.ranks is None else self.ranks:
            batch = self._batch(self.target.batch_index, rank)
            replayed = replay_once(self.training, batch, None, self.target.step)
            if whole is not None:
                replayed = replace(replayed, loss=whole[0], grad_norm=whole[1])
            events.append(self._event(rank, state, state_step, batch, replayed))
        return events

    def _event(self, rank: int, state: str, state_step: int, batch: Batch, replayed: Replay) -> dict[str, Any]:
        came_back = is_reproduced(self.verdict, replayed)
        return {
            "rank": rank,
            "verdict": self.target.kind,
            "state": state,
            "state_step": state_step,
            "batch_index": batch.index,
            "came_back": came_back,
            "loss": replayed.loss,
            "loss_refused": self.target.loss,
            "loss_level": self.target.loss_level,
            "grad_norm": replayed.grad_norm,
            "local_loss": replayed.local_loss,
            **findings(self.training, batch, replayed),
        }

    # Steps before it.

    def _take(self, update: Update) -> float:
        """Repeat a step's update; returns its loss."""
        training = self.training
        for _ in range(MAX_OVERFLOWS):
            loss, norm = self._gradients(update.batch_index)
            if not training.absorb_overflow(norm):
                break
        if update.rate is not None:
            usual = learning_rate(update.step - 1, training.config.model_copy(update={"optim": self._optim}))
            scaled = self._optim.lr * (update.rate / usual if usual else 1.0)
            training.config = training.config.model_copy(
                update={"optim": self._optim.model_copy(update={"lr": scaled})}
            )
        training.step(update.step - 1)
        return loss

    def _whole(self, batch_index: int) -> tuple[float, float]:
        """Return loss and gradient norm over all shares; the gradients are dropped."""
        found = self._gradients(batch_index)
        self.training.discard()
        return found

    def _gradients(self, batch_index: int) -> tuple[float, float]:
        """Return global loss and gradient norm; keeps the clipped gradients for an update. Collective."""
        training = self.training
        if self.ranks is None:
            own = training.forward_backward(self._batch(batch_index, training.rank)).double().view(1)
            share = own / training.plan.loss_copies if training.has_loss else torch.zeros_like(own)
            clipped = training.clip(share)
            return clipped.sums[0], clipped.norm
        total = 0.0
        for rank in self.ranks:
            total += training.forward_backward(self._batch(batch_index, rank)).item()
        for _, parameter in training.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= len(self.ranks)
        return total / len(self.ranks), training.clip().norm

    def _batch(self, batch_index: int, rank: int) -> Batch:
        """Return a rank's share of the batch. In a single process, the training stands for that rank."""
        training = self.training
        if isinstance(training.plan, _Share):
            training.plan = replace(training.plan, share=rank)
        size = training.plan.data_size
        whole = training.stream.batch(batch_index, training.data_rank, size)
        return training.own_piece(whole).to(training.device)
