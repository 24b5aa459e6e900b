"""A callback for Lightning's Trainer.

trainer = lightning.Trainer(callbacks=[RankscopeCallback()])
trainer.fit(module, loader)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

if TYPE_CHECKING:  # type checkers find `probes`, not its alias `rankscope.probes`, which exists only at run time
    from probes.attach.attach import Attached
    from probes.attach.auto_attach import auto_attach
    from probes.profiling.memory_snapshots import record_exception
else:
    from rankscope.probes.attach.attach import Attached
    from rankscope.probes.attach.auto_attach import auto_attach
    from rankscope.probes.profiling.memory_snapshots import record_exception

__all__ = ["RankscopeCallback"]


class RankscopeCallback(Callback):
    """Records a Trainer's `fit` on every rank. The arguments mean the same as in `rankscope.attach`."""

    def __init__(
        self, *, name: str = "", run_dir: str | os.PathLike[str] | None = None, gradient_interval: int = 50
    ) -> None:
        self._options: dict[str, Any] = {"name": name, "run_dir": run_dir, "gradient_interval": gradient_interval}
        self._attached: Attached | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach: the process group exists, and the strategy has not wrapped the module yet."""
        if stage == "fit" and self._attached is None:
            settings = {name: value for name, value in dict(pl_module.hparams).items() if _is_plain(value)}
            about = {
                "strategy": type(trainer.strategy).__name__,
                "precision": str(trainer.precision),
                "hparams": settings,
            }
            self._attached = auto_attach(config={"lightning": about}, **self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the loss of `training_step`. With gradient accumulation it is divided by the number of batches, so it is
        not logged.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._attached is not None and loss is not None and trainer.accumulate_grad_batches == 1:
            self._attached.log(loss=loss.detach() if hasattr(loss, "detach") else loss)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the validation loss, if the module logs it as `val_loss`."""
        loss = trainer.callback_metrics.get("val_loss")
        if self._attached is not None and loss is not None and not trainer.sanity_checking:
            self._attached.log(val_loss=loss)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record the exception. Lightning may handle it, so that Python's exception hook is not called."""
        if self._attached is not None and not isinstance(exception, KeyboardInterrupt):
            record_exception(self._attached.recorder, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._attached is not None:
            self._attached.detach()
            self._attached = None


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
