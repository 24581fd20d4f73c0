"""Methods of global tensors, and methods that plain tensors and modules gain.

They are ``to_global``, ``to_local``, reading values, casting, copying and pickling. Users call them
on tensors. Importing this module installs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .._base import torch_private
from .._base.overridable import apply, visible
from .._base.patches import patch
from .._base.refusals import refuse_transforms
from .._tensor import autograd_hooks, storage
from .._tensor.convert import (
    all_ranks,
    check_meta_consistency,
    check_placement,
    device_type,
    gather_specs,
    global_id,
)
from .._tensor.copies import deepcopy, shallow_copy
from .._tensor.global_tensor import GlobalTensor
from .._tensor.grad import get_grad, set_grad
from .._tensor.gradients import parameter_gather, reducer
from .._tensor.history import detached_serial, identify_copy, record
from .._tensor.pending_tensor import (
    PendingTensor,
    materialized_first,
    register_lazy_functions,
)
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from .._tensor.serialization import reduce_ex
from .._tensor.set_data import (
    assign_requires_grad,
    data,
    laid_out_like,
    requires_grad_,
    resize_,
    set_,
    set_data,
)
from .._tensor.strides import (
    Note,
    arrange,
    copy_noted_order,
    copy_noted_strides,
    differ,
    forget_note,
    format_strides,
    is_contiguous,
    local_strides_tell,
    note_strides,
    stride,
    strides_of_copy,
)
from .._tensor.view_tracking import RemoteView, alias_of, finish_inplace
from ..boxing import box, log
from ..boxing.planner import plan_boxing
from ..distributed.run.serialize import register_wrapper
from ..distributed.world import placeholder, world
from ..errors import GlobalTensorError, LocalTensorError, RenamedError, SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, as_layout, broadcast
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import arrived, described, kind_of, refuse
from .backward import tensor_backward
from .dispatch import Handler, register_handlers
from .fallback import write_into_plain
from .local_plan import unpartial_norm_target

__all__ = ["GlobalTensor", "gather_global_value", "install"]


# ------------------------------------------------------------------------- between local and global


class _ToGlobal(torch.autograd.Function):
    """A conversion of local tensors into one global tensor.

    Backward: each local tensor receives the gradient of the values it contributed."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.spec, ctx.device = spec, local.device
        # a view of a communication buffer: without detach, autograd would forbid to write into it
        return _sync_replicas(local.detach(), spec).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        spec: Spec = ctx.spec
        mine = spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])
        return box(grads[0], spec.dual(), mine, why="gradient of to_global").to(ctx.device), None


def _sync_replicas(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Send the first rank's data along broadcast axes: it is the value there.

    Meta tensors have no data and are returned as they are."""
    axes = [] if local.is_meta else _replica_axes(spec)
    if not axes:
        return local
    with log.exchanges("to_global: the value of the first rank"):
        return world().comm(spec.placement.fiber(world().rank, axes)).broadcast(local, 0)


def _replica_axes(spec: Spec) -> list[int]:
    """Return the axes along which several ranks hold the same data."""
    return (
        [a for a, e in enumerate(spec.layout) if e.is_broadcast and spec.placement.shape[a] > 1]
        if spec.numel
        else []
    )


@functools.partial(visible, name="to_global")
def local_to_global(
    self: torch.Tensor,
    placement: Placement | None = None,
    sbp: Any = None,
    *,
    check_meta: bool = True,
    copy: bool = False,
) -> GlobalTensor:
    """Make a global tensor from each rank's local tensor.

    Collective over all ranks of the world.

    Ranks outside the placement must call too. The value depends on the sbp. Split: the local
    tensors are joined, and their sizes must follow the balanced rule. Broadcast: the first rank's
    data. Partial: the sum of the local tensors. ``check_meta=False`` skips the exchange of shapes,
    which is right only if every rank holds the same shape and dtype. Raises KindError and
    ShapeError with the ranks and what they hold, SbpError, and PlacementError.
    """
    if placement is None or sbp is None:
        missing = " and ".join(n for n, v in (("placement", placement), ("sbp", sbp)) if v is None)
        refuse_transforms()
        raise SbpError(
            f"to_global of a local tensor needs {missing}: "
            f"x.to_global(placement=flow.placement(...), sbp=flow.sbp.split(0))"
        )
    check_placement(placement)
    layout = as_layout(sbp, placement.axes)
    refuse_transforms()
    self = arrived(self)
    spec, alike = gather_specs(self, placement, layout, check_meta)
    history = world().history((placement,))
    history.record(history.code_of("to_global", spec))
    serial = history.serial
    graph = self.requires_grad and torch.is_grad_enabled()
    if placement.coordinate(world().rank) is None:
        # The result of `to_local` on this rank is a placeholder too. The gradient passes through
        # it, so that ranks agree on which of them has one.
        kept = graph and kind_of(self) is None and self.shape == (0,) and self.dtype is spec.dtype
        if not graph:
            return GlobalTensor.wrap(placeholder(spec), spec, serial)
        nothing = self if kept else placeholder(spec).requires_grad_()
        # not a leaf, as inside the placement
        local = nothing.view_as(nothing).to(world().outside(placement.type))
        reducer.observe_gradients(local)
        return GlobalTensor.wrap(local, spec, serial)
    local = self.to(world().device(placement.type), copy=copy)
    told_alike = alike and len(placement.flat) == world().size and not differ(spec)
    # questions about memory layout have one answer on all ranks
    if not local.is_contiguous() and not told_alike:
        local = local.contiguous()
    # A local tensor that no other rank holds is a view of the input. Autograd follows the view when
    # either is written into.
    if graph:
        out = GlobalTensor.wrap(
            _ToGlobal.apply(local, spec) if _replica_axes(spec) else local.view_as(local), spec
        )
        reducer.observe_gradients(out._local)
    else:
        out = GlobalTensor.wrap(apply(_sync_replicas, (local.detach(), spec), {}), spec)
    out._pinned = True
    out._serial = serial
    return out


def global_to_global(
    self: GlobalTensor,
    placement: Placement | None = None,
    sbp: Any = None,
    *,
    grad_sbp: Any = None,
    check_meta: bool = False,
    copy: bool = False,
) -> GlobalTensor:
    """Return the same value on another placement or with another sbp. Collective.

    A placement or sbp that is not passed stays the same. ``grad_sbp``: the sbp to which the
    gradient is boxed in backward (default: the dual of this tensor's sbp). Raises SbpError,
    PlacementError."""
    src, shown = self._spec, self._spec.shown
    where = shown.placement if placement is None else placement
    check_placement(where)
    if self.is_meta:
        refuse("the argument of to_global", {0: described(self, where)})
    if sbp is None:
        if where.axes != shown.placement.axes:
            raise SbpError(
                f"the new placement has {where.axes} ax{'i' if where.axes == 1 else 'e'}s, and "
                f"the tensor's sbp {shown.layout!r} is for {shown.placement.axes}: give sbp= with "
                f"one entry for each axis"
            )
        layout: Sequence[Sbp] = shown.layout
    else:
        layout = as_layout(sbp, where.axes)
    dst = src.replace(placement=where, layout=layout)
    back = (
        None
        if grad_sbp is None
        else src.replace(layout=as_layout(grad_sbp, src.placement.axes, "grad_sbp"))
    )
    if dst is shown and back is None:
        return self.clone() if copy else self
    self = self._materialize()
    serial = _record_move("to_global", self, dst)
    # without an alias, because a write into the result must not reach this tensor
    local = box(self._local, src, dst, back, why="to_global", alias=False)
    if local is self._local:
        local = local.clone() if copy else local.view_as(local)
    out = GlobalTensor.wrap(local, dst, serial)
    out._pinned = sbp is not None
    return out


def _record_move(what: str, x: GlobalTensor, dst: Spec) -> int:
    """Record that ``x`` is boxed to ``dst``, if data moves. Return the result's serial."""
    src = x._spec.shown
    if not plan_boxing(x._spec, dst).bytes:  # one rank may do it alone
        # Ranks outside the tensor's placement may know it by another serial.
        known = dst.placement is src.placement or {*dst.placement.flat} <= {*src.placement.flat}
        return hash((x._serial, int.from_bytes(dst.text, "little"))) if known else 0
    # The serial counts among the ranks of the tensor's placement. Others may not know it.
    history = world().history((src.placement,))
    history.record(history.code_of(what, dst), x._serial)
    if dst.placement is not src.placement:
        history = world().history((src.placement, dst.placement))
        history.record(history.code_of(what, dst))
    return history.serial


class _ToLocal(torch.autograd.Function):
    """A conversion to the local tensor.

    The gradient is a local tensor of a global one with ``grad_sbp``."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, grad: Spec, dual: Spec) -> torch.Tensor:
        ctx.grad, ctx.dual = grad, dual
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return box(grads[0], ctx.grad, ctx.dual, why="gradient of to_local"), None, None


def tensor_to_local(
    self: GlobalTensor, *, grad_sbp: Any = None, copy: bool = False
) -> torch.Tensor:
    """Return this rank's local tensor, an ordinary tensor. It is empty outside the placement.

    The call does not communicate, with three exceptions. One is a parameter that ZeRO shards. One
    is a view that needed communication and whose base was written into since. One is a mean loss
    before its backward pass, with `fuse_loss_count`. ``grad_sbp``: the sbp of the gradients that
    the ranks pass back. Its default is the dual of the sbp, so the gradients of a broadcast tensor
    are summed. If every rank computes the same from the local tensor, pass ``grad_sbp=broadcast``.
    """
    self = parameter_gather.to_logical(self)
    local, dual = self._local, self._spec.dual()
    grad = (
        dual
        if grad_sbp is None
        else self._spec.replace(layout=as_layout(grad_sbp, self._spec.placement.axes, "grad_sbp"))
    )
    if local.requires_grad:
        local = local.view_as(local) if grad is dual else _ToLocal.apply(local, grad, dual)
    return local.clone() if copy else local


def plain_to_local(self: torch.Tensor, **options: Any) -> torch.Tensor:
    raise GlobalTensorError(
        "to_local() of a tensor that is local already: to_local() is for tensors made by "
        "to_global or with placement=, sbp="
    )


def _needs_global(name: str) -> property:
    def get(self: torch.Tensor) -> Any:
        raise LocalTensorError(
            f"a local tensor has no .{name}: make it global with x.to_global(placement, sbp) first"
        )

    return property(get)


def _renamed(old: str, new: str) -> property:
    def get(self: torch.Tensor) -> Any:
        raise RenamedError(f".{old} is .{new} now")

    return property(get)


# ----------------------------------------------------------------------------- values on every rank


def gather_global_value(x: GlobalTensor) -> torch.Tensor:
    """Return the full value as a plain CPU tensor on every rank of the world. Collective.

    Raises NotImplementedError on the meta device, as torch does."""
    if x.is_meta:
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! It has a shape and a layout, and no values"
        )
    spec = x._materialize()._spec
    this_world = world()
    local = x._local.detach()
    if set(spec.placement.flat) >= set(range(this_world.size)):
        _record_move("read", x, spec.replicated())
        return box(local, spec, spec.replicated(), why="reading a value").cpu()
    everywhere = all_ranks(this_world.size)
    return box(
        local, spec, spec.replace(placement=everywhere, layout=[broadcast]), why="reading a value"
    )


def numpy(self: GlobalTensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    """Return the full value as an array on every rank of the world. Collective.

    Raises RuntimeError if the tensor requires grad, unless ``force``. A conjugate, which PyTorch
    refuses because the array could not share its memory, becomes an array of its values."""
    if self.requires_grad and not force and torch.is_grad_enabled():
        raise RuntimeError(
            "Can't call numpy() on a tensor that requires grad: use x.detach().numpy() or "
            "x.numpy(force=True)"
        )
    return gather_global_value(self).resolve_conj().resolve_neg().numpy()


def item(self: GlobalTensor) -> Any:
    return gather_global_value(self).item()


def tolist(self: GlobalTensor) -> Any:
    return gather_global_value(self).tolist()


def to_text(self: GlobalTensor, *, tensor_contents: Any = None) -> str:
    shown = repr(
        gather_global_value(self)
        if not self.is_meta
        else torch.empty(self.shape, dtype=self.dtype, device="meta")
    )
    extra = (
        f", grad_fn=<{self._local.grad_fn.name()}>"
        if self._local.grad_fn is not None
        else ", requires_grad=True"
        if self.requires_grad
        else ""
    )
    prefix = "Parameter containing:\n" if getattr(self, "_is_param", False) else ""
    return f"{prefix}{shown[:-1]}, placement={self.placement!r}, sbp={self.sbp!r}{extra})"


def format_value(self: GlobalTensor, spec: str) -> str:
    return (
        format(self.item(), spec)
        if self.dim() == 0
        else object.__format__(self, spec)
        if spec
        else to_text(self)
    )


def array(self: GlobalTensor, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
    value = numpy(self)
    return value if dtype is None else value.astype(dtype, copy=False)


# ---------------------------------------------------------------------------- dtype, device, copies


def _with_dtype(x: GlobalTensor, dtype: torch.dtype) -> GlobalTensor:
    if dtype is x.dtype:
        return x
    x = source = x._materialize()
    spec = x._spec
    linear = all(d.is_floating_point or d.is_complex for d in (dtype, spec.dtype))
    if any(e.is_partial for e in spec.layout) and not linear:
        x = x.to_global(sbp=[broadcast if e.is_partial else e for e in spec.layout])
    out = GlobalTensor.wrap(x._local.to(dtype), spec := x._spec.replace(dtype=dtype))
    if x is source:
        copy_noted_order(source, out)
    else:
        arrange(out, strides_of_copy(source))
    return identify_copy(out, x, int.from_bytes(spec.text, "little"))


_view_classes: set[type] = set()


def register_view_class(cls: type) -> None:
    """Let ``x.to(cls)`` be ``cls(x)``, as for ``nn.graph.GraphTensor``."""
    _view_classes.add(cls)


def to(self: GlobalTensor, *args: Any, **kwargs: Any) -> Any:
    """Convert as torch does: to a dtype, a device type, that of another tensor, or both.

    A device type is "cpu" or "cuda": the placement's ranks stay the same."""
    if args and isinstance(args[0], type) and args[0] in _view_classes:
        return args[0](self)
    switches = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
    copy, order = (
        kwargs.pop("copy", len(switches) > 1 and switches[1]),
        kwargs.pop("memory_format", None),
    )
    kwargs.pop("non_blocking", None)
    out = self
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.dtype):
            out = _with_dtype(out, a)
        elif isinstance(a, torch.Tensor):
            out = _with_dtype(out, a.dtype)
            if isinstance(a, GlobalTensor):
                out = out.to_global(
                    placement=a.placement, sbp=out.sbp if a.placement is out.placement else a.sbp
                )
        elif isinstance(a, (str, torch.device, int)) and not isinstance(a, bool):
            kind = device_type(a)
            if kind != out._spec.placement.type:
                out = out.to_global(
                    placement=out._spec.placement.with_type(kind), sbp=out._spec.layout
                )
    stays = out is self and not copy and _already_in_format(self, order)
    if order not in (None, torch.preserve_format) and not stays:
        out = out.contiguous(memory_format=order)
    return out.clone() if copy and out is self else out


def _already_in_format(x: GlobalTensor, order: Any) -> bool:
    """Return True if torch casts ``x`` to the usual memory format by returning ``x`` itself.

    A tensor that is not in channels_last counts as in the usual format."""
    return order is torch.contiguous_format and not _channels_last(x)


def _channels_last(x: GlobalTensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and is_contiguous(x, formats[x.dim()]) and not is_contiguous(x)


def cast(dtype: torch.dtype) -> Callable[..., GlobalTensor]:
    def run(self: GlobalTensor, memory_format: Any = torch.preserve_format) -> GlobalTensor:
        out = _with_dtype(self, dtype)
        if memory_format is torch.preserve_format or (
            out is self and _already_in_format(out, memory_format)
        ):
            return out
        return out.contiguous(memory_format=memory_format)

    return run


def type_(self: GlobalTensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    if dtype is None:
        return self._stored.type()
    return (
        _with_dtype(self, dtype)
        if isinstance(dtype, torch.dtype)
        else _with_dtype(self, torch.empty(0).type(dtype).dtype)
    )


def detach(self: GlobalTensor) -> GlobalTensor:
    return alias_of(self, detached=True)


def detach_(self: GlobalTensor) -> GlobalTensor:
    """Detach the tensor from the graph in place.

    PyTorch detaches no view in place. A local tensor that is a view, for example of a communication
    buffer, is replaced by one that is not.
    """
    self._serial = detached_serial(self)
    if isinstance(self, RemoteView):
        self.detach_origin()
    elif self._local._is_view():
        self._local = self._local.detach()
    else:
        self._local.detach_()
    return self


def clone(self: GlobalTensor, *, memory_format: Any = torch.preserve_format) -> GlobalTensor:
    outside = self._spec.placement.coordinate(world().rank) is None
    out = GlobalTensor.wrap(
        self._local.clone(memory_format=torch.preserve_format if outside else memory_format),
        self._spec,
    )
    if memory_format is torch.preserve_format:
        copy_noted_order(self, out)
    else:
        arrange(out, format_strides(self.shape, memory_format))
    return identify_copy(out, self)


def _resolve_method(name: str) -> Callable[..., GlobalTensor]:
    """Return ``resolve_conj`` or ``resolve_neg``, for which a local tensor has a bit to resolve."""
    resolve = getattr(torch.Tensor, name)

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
        x: GlobalTensor = args[0]
        local = x._local
        resolved = resolve(local)
        if resolved is local:
            return x
        out = GlobalTensor.wrap(resolved, x._spec)
        copy_noted_order(x, out)
        out._serial = x._serial  # outside the placement it is x itself
        return out

    return run


def contiguous(self: GlobalTensor, memory_format: Any = torch.contiguous_format) -> GlobalTensor:
    if torch_private.function_mode_on() or local_strides_tell(self):
        local = self._local.contiguous(memory_format=memory_format)
        # the graph that a recorder captures must not depend on strides
        if local is self._local and not torch_private.function_mode_on():
            return self
        if not local_strides_tell(self) and not is_contiguous(self, memory_format):
            local = self._local.clone(memory_format=memory_format)
        # on another rank the result may be the tensor itself
        return GlobalTensor.wrap(local, self._spec, self._serial)
    if is_contiguous(self, memory_format):
        return self
    out = clone(self, memory_format=memory_format)
    note_strides(
        out,
        Note(
            torch.empty(self.shape, device="meta").contiguous(memory_format=memory_format).stride(),
            True,
        ),
    )
    return out


def copy_(self: GlobalTensor, src: Any, non_blocking: bool = False) -> GlobalTensor:
    """Copy a tensor's value into this one, boxed to this one's sbp.

    A plain tensor counts as the full value, the same on every rank."""
    unpartial_norm_target("copy_", self)
    if not isinstance(src, torch.Tensor):
        src = torch.as_tensor(src)
    if not isinstance(src, GlobalTensor):
        whole = operand_spec(src, self.placement, "the source of copy_")
        src = GlobalTensor.wrap(promote_plain_tensor(src, whole, "the source of copy_"), whole)
    if src.shape != self.shape:
        try:
            src = src.expand(self.shape)
        except RuntimeError:
            copied = (torch.empty(t.shape, device="meta") for t in (self, src))
            next(copied).copy_(next(copied))  # torch's own error for these shapes
            raise
    src = src._materialize()
    local = box(src._local, src._spec, self._spec.replace(dtype=src.dtype), why="copy_")
    record("copy_", self, src)
    self._local.copy_(local, non_blocking)
    return finish_inplace(self)


def pin_memory(self: GlobalTensor) -> GlobalTensor:
    return identify_copy(GlobalTensor.wrap(self._local.pin_memory(), self._spec), self)


def plain_copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], GlobalTensor):
        return copy_(*args, **kwargs)
    return write_into_plain(func, args[1].placement, args, kwargs)


def of_local(name: str) -> Callable[..., Any]:
    """Return a method that answers for the global tensor by asking the local one.

    The answer must not depend on values. The method never communicates."""
    method = getattr(torch.Tensor, name)
    return lambda self, *args, **kwargs: method(self._stored, *args, **kwargs)


# ------------------------------------------------------------- gradients, leaves, copies of objects


def turned(name: str) -> Callable[..., GlobalTensor]:
    """Return the in-place form of a view method: the tensor itself takes the view's shape."""
    view = getattr(torch.Tensor, name)

    def run(self: GlobalTensor, *args: Any, **kwargs: Any) -> GlobalTensor:
        if self._local.is_leaf and self._local.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"a leaf Variable that requires grad is being used in an in-place operation "
                f"({name}_)"
            )
        alone = self._memory is None
        out: Any = view(alias_of(self), *args, **kwargs)
        self._spec, self._memory = out._spec, None if alone else out._memory
        forget_note(self)
        copy_noted_strides(out, self)
        if isinstance(out, RemoteView) and not alone:
            self.__class__ = RemoteView  # type: ignore[assignment]  # a view of its former value
            self.rebind(out._local, out.__dict__["_origin"])  # type: ignore[attr-defined]
            if "_untracked" in out.__dict__:
                self.__dict__["_untracked"] = True
        else:
            self._local = out._local
        return self

    return run


def is_nonzero(self: GlobalTensor) -> bool:
    if self.numel() != 1:
        raise RuntimeError(
            f"Boolean value of a tensor of shape {list(self.shape)} is ambiguous: it must have "
            f"one element"
        )
    return bool(gather_global_value(self))


def _component(name: str) -> property:
    """Return the attribute ``real`` or ``imag``. torch lets no class override its assignment."""
    view: Any = getattr(torch.Tensor, name)

    def assign(self: GlobalTensor, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            view.__get__(self).copy_(value)
        else:
            view.__get__(self).fill_(value)

    return property(lambda self: view.__get__(self), assign)


METHODS: dict[str, Any] = {
    "to_global": global_to_global, "global_to_global": global_to_global,
    "to_local": tensor_to_local,
    "numpy": numpy, "item": item, "tolist": tolist, "__repr__": to_text, "__format__": format_value,
    "__array__": array,
    "__float__": lambda self: float(gather_global_value(self)),
    "__int__": lambda self: int(gather_global_value(self)),
    "__bool__": lambda self: bool(gather_global_value(self)),
    "__index__": lambda self: gather_global_value(self).__index__(),
    "__complex__": lambda self: complex(gather_global_value(self)),
    "to": to, "type": type_, "cpu": lambda self, *a, **k: to(self, "cpu"), "cuda": lambda self, *a,
    **k: to(self, "cuda"),
    "float": cast(torch.float32), "double": cast(torch.float64), "half": cast(torch.float16),
    "bfloat16": cast(torch.bfloat16), "int": cast(torch.int32),
    "long": cast(torch.int64), "short": cast(torch.int16), "char": cast(torch.int8),
    "byte": cast(torch.uint8), "bool": cast(torch.bool),
    "cfloat": cast(torch.complex64), "cdouble": cast(torch.complex128), "type_as": lambda self,
    other: _with_dtype(self, other.dtype),
    "detach": detach, "detach_": detach_, "clone": clone, "contiguous": contiguous, "copy_": copy_,
    "stride": stride, "is_contiguous": is_contiguous,
    "requires_grad_": requires_grad_, "retain_grad": autograd_hooks.retain_grad,
    "backward": tensor_backward, "register_hook": autograd_hooks.register_hook,
    "register_post_accumulate_grad_hook": autograd_hooks.register_post_accumulate_grad_hook,
    **{f"{name}_": turned(name) for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose",
        "unsqueeze")},
    "check_meta_consistency": check_meta_consistency, "global_id": global_id,
    "set_": set_, "resize_": resize_, "resize_as_": lambda self, other,
    **kwargs: resize_(self, other.shape), "is_nonzero": is_nonzero,
    "pin_memory": pin_memory,
    "__reduce_ex__": reduce_ex, "__copy__": shallow_copy, "__deepcopy__": deepcopy,
    "grad_fn": property(autograd_hooks.grad_fn),
    "requires_grad": property(lambda self: self._local.requires_grad, assign_requires_grad),
    "data": property(data, set_data),
    "grad": property(get_grad, set_grad, lambda self: set_grad(self, None)),
    "grad_dtype": property(
        lambda self: self._local.grad_dtype,
        lambda self, dtype: setattr(self._local, "grad_dtype", dtype),
    ),
    "real": _component("real"), "imag": _component("imag"),
    "nbytes": property(lambda self: self._spec.nbytes),
    "itemsize": property(lambda self: self._spec.dtype.itemsize),
    "is_cpu": property(lambda self: self._spec.placement.type == "cpu"),
    "is_cuda": property(lambda self: self._spec.placement.type == "cuda"),
    "is_xpu": property(lambda self: self._spec.placement.type == "xpu"),
    "names": property(lambda self: (None,) * self.dim()),
    "is_meta": property(lambda self: self._stored.is_meta),
    "layout": property(lambda self: self._stored.layout),
    "is_sparse": property(lambda self: self._stored.is_sparse),
    **{name: property(lambda self: False) for name in ("is_quantized", "is_nested", "is_mkldnn",
        "is_mps", "is_lazy")},
    **{name: of_local(name) for name in ("is_pinned", "get_device", "is_inference", "is_signed",
        "is_conj", "is_neg")},
    **{name: of_local(name) for name in ("is_shared", "storage_type")},
    **storage.METHODS,
}  # fmt: skip

#: Methods that make or move tensors. A graph capture records them as it records torch's functions.
RECORDED = {
    "to_global", "global_to_global", "to_local", "to", "type", "cpu", "cuda", "float", "double",
    "half", "bfloat16", "int", "long", "short", "char", "byte",
    "bool", "cfloat", "cdouble", "type_as", "detach", "detach_", "clone", "contiguous", "copy_",
    "backward", "pin_memory", "resize_", "resize_as_",
    *[f"{name}_" for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")],
}  # fmt: skip

#: Methods and properties that use no values, or that materialize a pending tensor themselves.
LAZY_METHODS = {
    "to_global", "global_to_global", "to", "type", "type_as", "cpu", "cuda", "float", "double",
    "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble",
    "backward", "check_meta_consistency", "global_id", "resize_", "resize_as_", "is_contiguous",
    "grad_dtype", "requires_grad", "nbytes", "itemsize",
    "is_cpu", "is_cuda", "is_xpu", "names", "is_meta",
    "layout", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_lazy",
    "is_pinned", "get_device", "is_inference", "is_signed", "is_conj", "is_neg", "is_shared",
    "storage_type",
    *storage.METHODS,
}  # fmt: skip

#: Methods and properties that ordinary tensors gain.
PLAIN: dict[str, Any] = {
    "to_global": local_to_global, "local_to_global": local_to_global, "to_local": plain_to_local,
    "is_global": property(lambda self: False),
    "is_local": property(lambda self: True), "is_lazy": property(lambda self: False),
    "is_consistent": _renamed("is_consistent", "is_global"),
    "to_consistent": _renamed("to_consistent", "to_global"),
    **{name: _needs_global(name) for name in ("placement", "sbp", "global_id",
        "check_meta_consistency")},
}  # fmt: skip


def install() -> None:
    """Add the methods to GlobalTensor, to pending tensors and to torch.Tensor."""
    for name, value in METHODS.items():
        setattr(GlobalTensor, name, visible(value, name) if name in RECORDED else value)
        if name not in LAZY_METHODS:
            first = materialized_first(value)
            setattr(PendingTensor, name, visible(first, name) if name in RECORDED else first)
    for name, value in PLAIN.items():
        patch(f"torch:Tensor.{name}", lambda before, value=value: value, missing=True)
    autograd_hooks.install()
    storage.install()
    register_wrapper(GlobalTensor.wrap)


def _plain_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``plain.to(global)``, which takes over only the dtype, as in PyTorch."""
    if isinstance(args[0], GlobalTensor):
        return GlobalTensor.to(*args, **kwargs)
    return args[0].to(
        next(a for a in (*args[1:], *kwargs.values()) if isinstance(a, GlobalTensor)).dtype
    )


def _plain_type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``plain.type_as(global)``, which returns a global tensor as in OneFlow.

    It has the dtype and placement of the global one and, where the shape allows it, the sbp. The
    plain tensor must be the same on every rank, and is the full value."""
    if isinstance(args[0], GlobalTensor):
        return GlobalTensor.type_as(*args, **kwargs)
    other = args[1] if len(args) > 1 else kwargs["other"]
    out = laid_out_like(other, args[0].to(other.dtype))
    record("type_as", out)
    return out


def _may_take_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if all tensors are global: a global tensor can take over the data of any other.

    `set_data` replaces the data whatever the layouts, also from the meta device, where torch makes
    new parameters. The tensor stays tied and known to its optimizer."""
    return all(isinstance(t, GlobalTensor) for t in args)


def _flatten_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Move a recurrent layer's weights into one piece of memory, as it wants them on a GPU.

    This is done if every rank holds the full weights. Others are gathered for each call anyhow."""
    weights, *rest = args
    if not torch_private.recording.on and all(
        isinstance(w, GlobalTensor)
        and all(e.is_broadcast for e in w._spec.layout)
        and w._local.numel()
        for w in weights
    ):
        func([w._local for w in weights], *rest, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    return lambda func, args, kwargs: METHODS[name](*args, **kwargs)


def _torch_function(name: str) -> Any:
    """Return torch's function of that name, or its method where it has no function."""
    return getattr(torch, name, None) or getattr(torch.Tensor, name)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x, other = args if len(args) > 1 else (args[0], kwargs["other"])
    return x.shape == other.shape and bool((x == other).all())


def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


_AS_FUNCTIONS = (
    "detach", "detach_", "clone", "is_inference", "is_shared", "storage_type", "is_conj", "is_neg",
    "is_signed",
)  # fmt: skip
_VIEWS_IN_PLACE = ("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
_OF_OWN_CLASS = ("is_contiguous", "stride")  # torch calls the method of the tensor's own class
_ANSWERS: dict[Any, Handler] = {
    **{_torch_function(name): _method(name) for name in _AS_FUNCTIONS},
    **storage.HANDLERS,
    **{getattr(torch.Tensor, name): _method(name) for name in (*_VIEWS_IN_PLACE, *_OF_OWN_CLASS)},
    **{METHODS[name]: _method(name) for name in _OF_OWN_CLASS},
    **dict.fromkeys((torch.equal, torch.Tensor.equal), _equal),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), _allclose),
    torch.Tensor.copy_: plain_copy_,
    torch.Tensor.resize_as_: lambda func, args, kwargs: args[0].resize_(args[1].shape, **kwargs),
    torch_private.flatten_recurrent_weights: _flatten_weights,
    torch_private.may_take_data: _may_take_data,
    torch.Tensor.to: _plain_to,
    torch.Tensor.type_as: _plain_type_as,
    **{
        function: _resolve_method(name)
        for name in ("resolve_conj", "resolve_neg")
        for function in (getattr(torch, name), getattr(torch.Tensor, name))
    },
    torch.is_floating_point: lambda func, args, kwargs: args[0].dtype.is_floating_point,
    torch.is_complex: lambda func, args, kwargs: args[0].dtype.is_complex,
    torch.numel: lambda func, args, kwargs: args[0].numel(),
}
register_handlers(_ANSWERS, "method")
# for calls through the class: torch.Tensor.float(x)
register_handlers(
    {
        getattr(torch.Tensor, name): _method(name)
        for name, value in METHODS.items()
        if callable(value) and callable(getattr(torch.Tensor, name, None)) and name not in PLAIN
    },
    "method",
    replace=False,
)
register_lazy_functions(
    [
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch_private.may_take_data),
        *(
            getattr(owner, name)
            for name in LAZY_METHODS
            for owner in (torch, torch.Tensor)
            if callable(METHODS[name]) and callable(getattr(owner, name, None))
        ),
    ]
)
install()
register_handlers({getattr(PendingTensor, name): _method(name) for name in _OF_OWN_CLASS}, "method")
