"""The GlobalTensor class itself: one ordinary local tensor and a Spec.

The packages above (dispatch, autograd, tensor) add its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .._base import torch_private
from .._base.refusals import refusal_of_kernel
from ..errors import GlobalTensorError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp
from ..sharding.spec import Spec, StorageSpec

__all__ = ["ORDINARY", "AliasGroup", "GlobalTensor", "SlottedGlobalTensor", "refuse_kernel"]

_PACKAGE: Final = __name__.partition(".")[0] + "."
_refused: dict[Any, Callable[[Any], None]] = {}


def refuse_kernel(kernel: Any, refuse: Callable[[Any], None]) -> None:
    """Give a kernel an error of its own: ``refuse(args)`` raises it.

    Every other kernel that a global tensor reaches raises a general error.
    """
    _refused[kernel] = refuse


class AliasGroup:
    """The write counter shared by all tensors that alias the same data.

    See _tensor/view_tracking.py.
    """

    __slots__ = ("viewed", "writes")

    def __init__(self) -> None:
        self.writes = 0
        self.viewed = False  # True if one of them is a view of another


class _ClassOfGlobalTensors(type(torch.Tensor)):  # type: ignore[misc]
    """The metaclass of the classes of global tensors: each shows itself as GlobalTensor.

    There are several for speed alone. Their ``__module__`` and ``__qualname__`` stay as they are,
    so that pickles find them.
    """

    def __init__(cls, name: str, bases: Any, namespace: Any) -> None:
        super().__init__(name, bases, namespace)
        if namespace["__module__"].startswith(_PACKAGE):
            cls.__name__ = "GlobalTensor"

    def __repr__(cls) -> str:
        if not cls.__module__.startswith(_PACKAGE):
            return type.__repr__(cls)  # a user's subclass
        return "<class 'globaltensor.GlobalTensor'>"


class GlobalTensor(torch.Tensor, metaclass=_ClassOfGlobalTensors):
    """A tensor spread over the ranks of a placement.

    It has the shape, the values and the gradients of the full tensor, and PyTorch's functions and
    methods take it as they take any tensor. ``placement`` names its ranks, ``sbp`` says what each
    of them holds, and ``to_local()`` returns that. ``to_global`` and the creation functions make
    it; it is never constructed directly.

    >>> import torch
    >>> import globaltensor as flow
    >>> x = flow.ones(4, 6, placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0))
    >>> x.shape, x.sbp, x.is_global
    (torch.Size([4, 6]), (globaltensor.sbp.split(dim=0),), True)
    >>> x.sum().item()
    24.0
    """

    # This class has no slots, so that a plain tensor or parameter can become one and stay the same
    # object (parallel/module_to_global.py). Ops return a `SlottedGlobalTensor`.

    # This rank's local tensor, an ordinary one that autograd works on. Reading it never
    # communicates. `_materialize()` does what must be done before it may be read.
    _local: torch.Tensor
    # Describes the global tensor that the local tensors form.
    _spec: Spec
    _memory: AliasGroup | None  # None: it has no alias
    # Identifies the tensor on all ranks of its placement (distributed/divergence.py, `History`).
    # 0: not known.
    _serial: int = 0
    # The gradient of a leaf that other ranks contribute to (gradients/leaf.py).
    _leaf: Any = None
    # the user chose this sbp explicitly (to_global, creation): in-place ops must not change it
    _pinned: bool = False
    # The dtype in which its gradient is summed over the ranks (gradients/reducer.py).
    _reduce_dtype: torch.dtype | None = None
    _shard: StorageSpec | None = (
        # for a replicated parameter: the shard of it that this rank's optimizer steps
        # (optim/zero.py)
        None
    )
    _grad_shard: StorageSpec | None = None  # the layout of its gradient

    def __new__(cls, *args: Any, **kwargs: Any) -> GlobalTensor:
        raise GlobalTensorError(
            "GlobalTensor(...), as in type(p)(value): the class alone does not say on which ranks "
            "the tensor is, and in which layout. Use value.to_global(placement, sbp). To give a "
            "parameter other values in its own layout, use module.load_state_dict(...), or "
            "p.copy_(value) under torch.no_grad()"
        )

    @staticmethod
    def wrap(local: torch.Tensor, spec: Spec, serial: int = 0) -> GlobalTensor:
        """Return a GlobalTensor of this local tensor, unchecked."""
        out = torch_private.make_wrapper(
            SlottedGlobalTensor, spec.shape, dtype=spec.dtype, device=local.device
        )
        out._local = local
        out._spec = spec
        out._memory = None
        out._serial = serial
        return out  # type: ignore[no-any-return]

    @staticmethod
    def without_slots(local: torch.Tensor, spec: Spec) -> GlobalTensor:
        """Return a GlobalTensor of the class that a module's parameters have.

        Such a tensor can become plain and stay the same object.
        """
        out = torch_private.make_wrapper(
            GlobalTensor, spec.shape, dtype=spec.dtype, device=local.device
        )
        out._local, out._spec, out._memory = local, spec, None
        return out  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_private.READING_A_NUMBER:
            return args[0].item()
        if (refuse := _refused.get(func)) is not None:
            refuse(args)
        raise refusal_of_kernel(func)

    def _materialize(self) -> GlobalTensor:
        """Fetch or compute the local tensor of a `PendingTensor`, in place, and return the tensor.

        It may be collective. Any other tensor has its local tensor, so that nothing is done.
        """
        return self

    @property
    def _stored(self) -> torch.Tensor:
        """A tensor with the device, layout and kind of memory of the local tensor.

        The values of a `PendingTensor` may be out of date.
        """
        return self._local

    @property
    def spec(self) -> Spec:
        return self._spec.shown

    @property
    def is_global(self) -> bool:
        return True

    @property
    def is_local(self) -> bool:
        return False

    @property
    def placement(self) -> Placement:
        return self._spec.shown.placement

    @property
    def sbp(self) -> tuple[Sbp, ...]:
        return self._spec.shown.sbp

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._spec.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's local tensor (the placement's device type)."""
        local = self._stored
        return (
            local.device
            if local.numel() or local.device.type == self._spec.placement.type
            else torch.device(self._spec.placement.type)
        )

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._local.is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        return self._local.output_nr

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._local._version

    def size(self, dim: int | None = None) -> Any:
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        return len(self._spec.shape)

    ndimension = dim

    def numel(self) -> int:
        return self._spec.numel

    nelement = numel

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __dir__(self) -> list[str]:
        # torch's own is recorded like an operation, and a debugger asks on one rank alone
        return sorted({*object.__dir__(self)} - {"volatile", "__cuda_array_interface__"})

    def is_floating_point(self) -> bool:
        return self._spec.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self._spec.dtype.is_complex

    def element_size(self) -> int:
        return self._spec.dtype.itemsize

    def _repr_html_(self) -> str:
        """Return the drawing of its layout that notebooks show. Nothing communicates for it."""
        from ..sharding.sharding_svg import layout_html

        return layout_html(self.spec, "print(x), on every rank, shows the values")


class SlottedGlobalTensor(GlobalTensor):
    """A GlobalTensor whose fields are slots.

    Setting them takes a tenth of the time that it takes in a dict (15 against 150 ns, CPython
    3.11).
    """

    __slots__ = ("_local", "_memory", "_serial", "_spec")


#: The classes of ordinary global tensors, which have their local tensor. A `PendingTensor` may have
#: to be materialized first.
ORDINARY = frozenset((GlobalTensor, SlottedGlobalTensor))
