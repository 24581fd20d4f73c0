"""Error classes. All derive from RuntimeError: Python swallows a TypeError raised inside an
operator's dunder method."""

import sys


class GlobalTensorError(RuntimeError):
    """Base of every error this library raises on purpose."""


class PlacementError(GlobalTensorError):
    """A placement that cannot exist, or two placements that do not fit together."""


class SbpError(GlobalTensorError):
    """An sbp that does not fit its placement, its tensor or the operation."""


class ShapeError(GlobalTensorError):
    """Ranks whose local tensors do not form one global tensor."""


class KindError(GlobalTensorError):
    """A tensor of a kind that global tensors are not made of: sparse, nested, quantized, or of a
    class that decides what its values are."""


class BoxingError(GlobalTensorError):
    """Data would have to move where that is forbidden, or cannot move."""


class WorldError(GlobalTensorError):
    """The process group is missing, misconfigured or has failed."""


class DivergenceError(WorldError):
    """Ranks that do different things: other operations, numbers or plain tensors."""


class ReplicatedError(GlobalTensorError):
    """A collective would add up over ranks what every rank holds whole."""


class ScheduleError(GlobalTensorError):
    """A pipeline schedule that cannot exist, cannot be read or would not end."""


class ClusterError(GlobalTensorError):
    """A description of a cluster that cannot be read."""


class InplaceError(SbpError):
    """An in-place op that would need the sbp of its target changed."""


class FormError(GlobalTensorError, TypeError, ValueError):
    """A form of a call that its rule does not describe: it runs on whole tensors. Any other error
    in a rule is a fault of the rule."""


class LocalTensorError(GlobalTensorError, AttributeError):
    """A plain tensor was asked for what only a global one has. ``hasattr(x, "sbp")`` is False of a
    plain tensor."""


class RenamedError(GlobalTensorError, AttributeError):
    """An older name, which is gone; the message has the newer one. ``hasattr`` is False of it."""


class KernelError(GlobalTensorError):
    """A global tensor reached a kernel below the function level."""


class StorageError(GlobalTensorError, BufferError):
    """The memory of a global tensor was asked for, which lies in parts on several ranks. (A
    BufferError: that is what DLPack's protocol wants to see.)"""


class InterfaceError(StorageError, AttributeError):
    """The same, of an attribute that other libraries look for: ``hasattr`` is False of it."""


class PartError(GlobalTensorError):
    """A file holds another part of a global tensor than the rank that reads it needs."""


class CompileError(GlobalTensorError):
    """Code that must be compiled as a whole (``torch.compile(..., fullgraph=True)``) works on
    global tensors."""


class CompileWarning(UserWarning):
    """Code that torch.compile was to compile works on global tensors, and runs as it is."""


class FallbackWarning(UserWarning):
    """A function without a rule ran on whole tensors."""


def noted(error: BaseException, text: str) -> None:
    """Add a line to what an error says."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])
