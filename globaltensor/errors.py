"""Error and warning classes of this library. Every module raises these.

All errors derive from RuntimeError: Python swallows a TypeError raised inside an operator's dunder
method.
"""

import sys


class GlobalTensorError(RuntimeError):
    """The base of every error that this library raises on purpose.

    See also docs/errors.md#globaltensorerror.
    """


class PlacementError(GlobalTensorError):
    """A placement that cannot exist, or two placements that do not fit together.

    See also docs/errors.md#placementerror.
    """


class SbpError(GlobalTensorError):
    """An sbp that does not fit its placement, its tensor or the operation.

    See also docs/errors.md#sbperror.
    """


class ShapeError(GlobalTensorError):
    """A set of local tensors that do not form one global tensor.

    See also docs/errors.md#shapeerror.
    """


class KindError(GlobalTensorError):
    """A tensor of a kind that global tensors are not made of.

    Such kinds are sparse, nested and quantized tensors, and classes that decide what their values
    are.

    See also docs/errors.md#kinderror.
    """


class BoxingError(GlobalTensorError):
    """A boxing that is forbidden, or that is impossible.

    See also docs/errors.md#boxingerror.
    """


class WorldError(GlobalTensorError):
    """A process group that is missing, misconfigured or has failed.

    See also docs/errors.md#worlderror.
    """


class DivergenceError(WorldError):
    """A divergence of the ranks: their operations, numbers or plain tensors differ.

    See also docs/errors.md#divergenceerror.
    """


class ReplicatedError(GlobalTensorError):
    """A collective that would sum over ranks a value that every rank holds in full.

    See also docs/errors.md#replicatederror.
    """


class ScheduleError(GlobalTensorError):
    """A pipeline schedule that cannot exist, cannot be read or would not end.

    See also docs/errors.md#scheduleerror.
    """


class ClusterError(GlobalTensorError):
    """A description of a cluster that cannot be read.

    See also docs/errors.md#clustererror.
    """


class InplaceError(SbpError):
    """An in-place op that would need the sbp of its target changed.

    See also docs/errors.md#inplaceerror.
    """


class FormError(GlobalTensorError, TypeError, ValueError):
    """A form of a call that its rule does not describe: the call runs on replicated tensors.

    Any other error in a rule is a fault of the rule.

    See also docs/errors.md#formerror.
    """


class LocalTensorError(GlobalTensorError, AttributeError):
    """A read, on a plain tensor, of an attribute that only global tensors have.

    ``hasattr(x, "sbp")`` is False for a plain tensor.

    See also docs/errors.md#localtensorerror.
    """


class RenamedError(GlobalTensorError, AttributeError):
    """An older name, which is gone: the message has the newer one.

    ``hasattr`` is False for it.

    See also docs/errors.md#renamederror.
    """


class KernelError(GlobalTensorError):
    """A global tensor that reached a kernel below the function level.

    See also docs/errors.md#kernelerror.
    """


class StorageError(GlobalTensorError, BufferError):
    """An access to the memory of a global tensor, which is spread over several ranks.

    It is also a BufferError, because DLPack's protocol expects one.

    See also docs/errors.md#storageerror.
    """


class InterfaceError(StorageError, AttributeError):
    """A `StorageError` for an attribute that other libraries look for.

    ``hasattr`` is False for it.

    See also docs/errors.md#interfaceerror.
    """


class PartError(GlobalTensorError):
    """A file that holds another shard of a global tensor than the rank that reads it needs.

    See also docs/errors.md#parterror.
    """


class CompileError(GlobalTensorError):
    """A use of global tensors in code that must be compiled as a whole.

    ``torch.compile(..., fullgraph=True)`` demands that.

    See also docs/errors.md#compileerror.
    """


class GraphError(GlobalTensorError):
    """An error for code that no static graph can hold, or for a graph used otherwise than built.

    See also docs/errors.md#grapherror.
    """


class PlanError(GlobalTensorError):
    """The error that is raised where no plan can be made, or a file contains none.

    See also docs/errors.md#planerror.
    """


class ProblemError(GlobalTensorError):
    """An error in a problem's data, or in a file that should contain a problem.

    See also docs/errors.md#problemerror.
    """


class ZeroError(GlobalTensorError):
    """A ZeRO setting, or an optimizer, that ZeRO cannot work with.

    See also docs/errors.md#zeroerror.
    """


class CompileWarning(UserWarning):
    """A warning that code on global tensors runs uncompiled, despite torch.compile.

    See also docs/errors.md#compilewarning.
    """


class FallbackWarning(UserWarning):
    """A warning that a function without a rule ran on replicated tensors.

    See also docs/errors.md#fallbackwarning.
    """


def noted(error: BaseException, text: str) -> None:
    """Add a line to an error's message."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{text}", *error.args[1:])
