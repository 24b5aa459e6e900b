"""The loss of the last hidden states by `trainer.model.chunked_loss`, in every layout of the output layer's weight.

    model.output_loss = OutputLoss(softmax=Softmax.compiled("inductor"))
    loss = model.output_loss.of(hidden, head.weight, targets)       # what `model(tokens, targets)` returns

The weight is a plain tensor, also where FSDP has gathered it, or a DTensor split by vocabulary over the tensor-parallel
ranks. These read all hidden states: a rank that has a part of the sequence gathers them, and gradients are added up on
the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from trainer.layout.loss_chunks import tokens_at_once
from trainer.model.chunked_loss import Softmax, chunked_loss

__all__ = ["OutputLoss"]


@dataclass(slots=True)
class OutputLoss:
    """Loss computation of one model part."""

    softmax: Softmax = field(default_factory=Softmax.eager)
    reader: Callable[[Tensor], None] | None = None
    """Gets the loss of each token, (batch, seq)."""

    def of(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `hidden`, (batch, seq, dim), in nats a token, float32."""
        vocab_size, group = weight.shape[0], None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            group = mesh.get_group()
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        loss, of_token = chunked_loss(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            chunk=tokens_at_once(vocab_size),
            group=group,
            softmax=self.softmax,
        )
        if self.reader is not None:
            self.reader(of_token.view_as(targets))
        return loss
