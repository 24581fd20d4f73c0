"""``flow.losses``: the losses that a job minimises; user code and `Optimizer.minimize` add them."""

from __future__ import annotations

from .blob import Blob, recording
from .errors import JobError
from .recording.record import BlobRef

__all__ = ["add_loss"]


def add_loss(loss: Blob) -> None:
    """Add the mean over the elements of ``loss`` to the job's training objective.

    ``optimizer.*.minimize`` calls it. User code calls it with the older settings
    ``function_config().train.*``. Raise JobError if ``loss`` is no floating-point blob, if the job
    does not train, or if losses differ in shape.
    """
    tape = recording()
    if not isinstance(loss, Blob) or not loss.dtype.is_floating_point:
        raise JobError(f"add_loss: a blob of floating-point numbers is wanted, got {loss!r}")
    if not tape.record.training:
        raise JobError(
            f'add_loss: job {tape.record.name} is of type "predict": use '
            f'@flow.global_function(type="train")'
        )
    tape.seen(loss)
    if tape.record.losses and tape.loss_shape != loss.shape:
        raise JobError(
            f"add_loss: losses of shapes {list(tape.loss_shape)} and {list(loss.shape)}: bring "
            f"them to one shape, or reduce each to a scalar"
        )
    tape.loss_shape = loss.shape
    tape.record.losses.append(BlobRef(loss.index))
