"""A callback for Hugging Face's Trainer.

trainer = Trainer(model, args, train_dataset=data, callbacks=[RankscopeCallback()])
trainer.train()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:  # type checkers find `probes`, not its alias `rankscope.probes`, which exists only at run time
    from probes.attach.attach import Attached
    from probes.attach.auto_attach import auto_attach
    from probes.tape import event_kinds
else:
    from rankscope.probes.attach.attach import Attached
    from rankscope.probes.attach.auto_attach import auto_attach
    from rankscope.probes.tape import event_kinds

__all__ = ["RankscopeCallback"]


class RankscopeCallback(TrainerCallback):
    """Records a Trainer's training on every rank. The arguments mean the same as in `rankscope.attach`."""

    def __init__(
        self, *, name: str = "", run_dir: str | os.PathLike[str] | None = None, gradient_interval: int = 50
    ) -> None:
        self._options: dict[str, Any] = {"name": name, "run_dir": run_dir, "gradient_interval": gradient_interval}
        self._attached: Attached | None = None
        self._tokens_before = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With several ranks, attach now: afterwards the Trainer wraps the model in DDP or FSDP, and the process group
        must be recorded before that.
        """
        if args.world_size > 1:
            self._attach(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attach(args)
        self._tokens_before = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the step's tokens, if the Trainer counts them (`include_num_input_tokens_seen`)."""
        tokens = state.num_input_tokens_seen - self._tokens_before
        if self._attached is not None and tokens > 0:
            self._tokens_before = state.num_input_tokens_seen
            self._attached.log(tokens=round(tokens / args.world_size))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the evaluation loss."""
        loss = (kwargs.get("metrics") or {}).get("eval_loss")
        if self._attached is not None and loss is not None:
            self._attached.log(eval_loss=loss)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attached is not None and state.is_world_process_zero:
            self._attached.event(event_kinds.SAVED, step=state.global_step, folder=str(args.output_dir))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    def _attach(self, args: Any) -> None:
        if self._attached is None:
            settings = {key: value for key, value in args.to_sanitized_dict().items() if value is not None}
            self._attached = auto_attach(config={"huggingface": settings}, **self._options)
