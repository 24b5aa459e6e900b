"""A tracker for Hugging Face Accelerate.

accelerator = Accelerator(log_with=RankscopeTracker())
accelerator.init_trackers("my-project", config={"lr": 1e-3})
...
accelerator.log({"loss": loss.item()})
accelerator.end_training()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker
from torch import Tensor

if TYPE_CHECKING:  # type checkers find `probes`, not its alias `rankscope.probes`, which exists only at run time
    from probes.attach.attach import Attached
    from probes.attach.auto_attach import auto_attach
    from probes.tape import event_kinds
else:
    from rankscope.probes.attach.attach import Attached
    from rankscope.probes.attach.auto_attach import auto_attach
    from rankscope.probes.tape import event_kinds

__all__ = ["RankscopeTracker"]


class RankscopeTracker(GeneralTracker):
    """Records the training of an Accelerator on every rank. The arguments mean the same as in `rankscope.attach`.

    Create it before the Accelerator (as `log_with` requires anyway), because process groups and models are recorded
    from their first use on.
    """

    name = "rankscope"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self, *, name: str = "", run_dir: str | os.PathLike[str] | None = None, gradient_interval: int = 50
    ) -> None:
        super().__init__()
        self._attached = auto_attach(name=name, run_dir=run_dir, gradient_interval=gradient_interval)

    @property
    def tracker(self) -> Attached:
        """The handle that `rankscope.attach` returns."""
        return self._attached

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        if self._attached.recorder.rank == 0:
            self._attached.event(event_kinds.SETTINGS, **{str(name): value for name, value in values.items()})

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log all numbers; texts, tables and images are left to other trackers."""
        self._attached.log(**{name: value for name, value in values.items() if _is_number(value)})

    def finish(self) -> None:
        self._attached.detach()


def _is_number(value: Any) -> bool:
    """Return True for a number, and for a tensor with one element."""
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
