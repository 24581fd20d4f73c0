"""Creation of global tensors: torch's functions with ``placement=`` and ``sbp=``.

Their ``_like`` forms and the ``new_`` methods of global tensors are here too. Users call them as
`flow.ones`, `flow.rand` and so on, and the dispatcher calls their handlers.

Sizes are global. A rank makes only its own local tensor, where the values allow this (constants,
eye, integer ranges). Short tensors that are computed (linspace, windows) are computed in full on
every rank, so that they equal torch's bit for bit. Without ``placement`` and ``sbp`` these are
torch's own functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor

from .._base import torch_private
from .._base.argument_text import argument_text
from .._base.overridable import visible
from .._base.pytree import replaced, tensors_in
from .._base.refusals import dense_message
from .._tensor.convert import check_placement, device_type, to_global
from .._tensor.global_tensor import GlobalTensor
from .._tensor.history import record
from .._tensor.pending_tensor import register_lazy_functions
from .._tensor.plain_operands import check_replicated
from .._tensor.strides import by_rows, format_strides, note_order, strides_like
from .._tensor.view_tracking import finish_inplace
from ..distributed.world import placeholder, world
from ..errors import KernelError, PlacementError, SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, as_layout, broadcast, partial_sum
from ..sharding.spec import Spec
from . import random_streams as draws
from .dispatch import Handler, register_handlers
from .local_plan import unpartial_norm_target
from .random_streams import RandomFill, draw_global, fill_local, part
from .rules.gather_scatter import check_number

#: Default (placement, sbp) of tensors that are created without them (utils/global_view.py).
GLOBALLY: ContextVar[tuple[Placement | None, Any]] = ContextVar(
    "globaltensor_globally", default=(None, None)
)

#: Functions that accept the values themselves.
_OF_DATA: Final = ("tensor", "as_tensor")

Make = Callable[[Spec, tuple[Any, ...], dict[str, Any]], Tensor]

# ------------------------------------------------------------------------------------ local tensors


def _constant_maker(value: Callable[..., Tensor]) -> Make:
    """Return a maker whose local tensor is made like the global one.

    It calls ``value(shape, args, kwargs, dtype=, device=)`` with the call's arguments."""

    def make(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        rank = world().rank
        if spec.placement.coordinate(rank) is None:
            return placeholder(spec)
        local = value(
            spec.local_shape(rank),
            args,
            kwargs,
            dtype=spec.dtype,
            device=world().device(spec.placement.type),
        )
        return draws.zero_unless_owner(local, spec)

    return make


def _argument(
    args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any = None
) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _full(
    shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Tensor:
    return torch.full(shape, _argument(args, kwargs, 1, "fill_value"), **options)


def _plain_function(name: str) -> Callable[..., Any]:
    """Return torch's creation function of this name."""
    return _tensor if name == "tensor" else getattr(torch, name)  # type: ignore[no-any-return]


def _tensor(data: Any, **options: Any) -> Tensor:
    """Return ``torch.tensor(data, **options)``, but copy a tensor without torch's warning.

    The warning would name a line of this file.
    """
    if not isinstance(data, Tensor):
        return torch.tensor(data, **options)
    requires_grad = options.pop("requires_grad", False)
    pin_memory = options.pop("pin_memory", False)
    copy = data.detach().to(**options, copy=True)
    copy = copy.pin_memory() if pin_memory else copy
    return copy.requires_grad_() if requires_grad else copy


def _sliced_maker(name: str) -> Make:
    """Return a maker that computes the global tensor on every rank and keeps the rank's shard."""

    def make(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if spec.placement.coordinate(world().rank) is None:
            return placeholder(spec)
        device = world().device(spec.placement.type)
        whole = _plain_function(name)(*args, **kwargs, device=device)
        if name in _OF_DATA and len(spec.placement.flat) > 1:
            if world().compares:
                check_replicated(whole, spec.placement, name)
            else:
                world().note_replicated(whole, spec.placement.flat, name)
        return part(whole, spec)

    return make


def _eye(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    local = MAKE["zeros"](spec, (), {})
    if local.dim() == 2:
        (row, column), _ = spec.box(world().rank)
        local.diagonal(row - column).fill_(1)
    return draws.zero_unless_owner(local, spec)


def _arange(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    rank = world().rank
    numbers = [*args, *(kwargs[k] for k in ("start", "end", "step") if k in kwargs)]
    # Only integers are the same when counted from another start: torch's vectorised float ranges
    # round by position.
    if (
        spec.dtype.is_floating_point
        or not all(type(a) is int for a in numbers)
        or spec.placement.coordinate(rank) is None
    ):
        return _sliced_maker("arange")(spec, args, kwargs)
    if "end" in kwargs:
        start, step = _argument(args, kwargs, 0, "start", 0), _argument(args, kwargs, 2, "step", 1)
    else:
        start, step = (
            (args[0] if len(args) > 1 else kwargs.get("start", 0)),
            _argument(args, kwargs, 2, "step", 1),
        )
    (offset,), (length,) = spec.box(rank)
    first = start + offset * step
    return draws.zero_unless_owner(
        torch.arange(
            first,
            first + length * step,
            step,
            dtype=spec.dtype,
            device=world().device(spec.placement.type),
        ),
        spec,
    )


def _random_maker(fill: Callable[[tuple[Any, ...], dict[str, Any]], RandomFill]) -> Make:
    def make(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return fill_local(spec, fill(args, kwargs), kwargs.get("generator"))

    return make


def _randint_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RandomFill:
    """Return the fill of randint(high, size) or randint(low, high, size).

    The size is the last positional argument."""
    numbers = [a for a in args if not isinstance(a, (tuple, list))]  # a torch.Size is a tuple
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 or ("high" in kwargs and numbers) else 0)
    return RandomFill(
        "random_", (int(low), int(kwargs["high"] if "high" in kwargs else numbers[-1]))
    )


def _normal(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    mean, std = _argument(args, kwargs, 0, "mean"), _argument(args, kwargs, 1, "std", 1.0)
    generator = kwargs.get("generator")
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return fill_local(spec, RandomFill("normal_", (mean, std)), generator)
    for operand in (mean, std):
        if isinstance(operand, Tensor):
            draws.check_drawn_from(operand, spec, "normal")
    return draw_global(
        spec,
        lambda: torch.normal(mean, std, generator=generator).to(
            world().device(spec.placement.type)
        ),
        generator,
    )


def _randperm(spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return draw_global(
        spec,
        lambda: torch.randperm(*args, **kwargs, device=world().device(spec.placement.type)),
        kwargs.get("generator"),
    )


_WINDOWS: Final = (
    "bartlett_window",
    "blackman_window",
    "hamming_window",
    "hann_window",
    "kaiser_window",
)
#: name -> function that returns how to fill a tensor with random numbers
FILL: Final[dict[str, Callable[[tuple[Any, ...], dict[str, Any]], RandomFill]]] = {
    "rand": lambda a, k: RandomFill("uniform_", (0.0, 1.0)),
    "randn": lambda a, k: RandomFill("normal_", (0.0, 1.0)),
    "randint": _randint_fill,
}
#: name -> function that makes a rank's local tensor
MAKE: Final[dict[str, Make]] = {
    "ones": _constant_maker(lambda shape, a, k, **o: torch.ones(shape, **o)),
    "zeros": _constant_maker(lambda shape, a, k, **o: torch.zeros(shape, **o)),
    "empty": _constant_maker(lambda shape, a, k, **o: torch.empty(shape, **o)),
    "full": _constant_maker(_full),
    "eye": _eye,
    "arange": _arange,
    **{
        name: _sliced_maker(name)
        for name in (
            "linspace",
            "logspace",
            "tensor",
            "as_tensor",
            "scalar_tensor",
            "tril_indices",
            "triu_indices",
            *_WINDOWS,
        )
    },
    **{name: _random_maker(fill) for name, fill in FILL.items()},
    "normal": _normal,
    "randperm": _randperm,
}

# ---------------------------------------------------------------------------------------- functions


def check_whole(name: str, placement: object, sbp: object, kwargs: dict[str, Any]) -> None:
    """Raise PlacementError or SbpError if the arguments do not define one global tensor."""
    if placement is None:
        raise PlacementError(
            f"{name} got sbp={sbp!r} but no placement: add placement=globaltensor.placement(type, "
            f"ranks), or leave out sbp for an ordinary tensor"
        )
    check_placement(placement)  # type: ignore[arg-type]
    assert isinstance(placement, Placement)
    if sbp is None:
        each = f" (a list, one for each of the {placement.axes} axes)" * (placement.axes > 1)
        raise SbpError(
            f"{name} got a placement but no sbp: add sbp=broadcast, split(dim) or partial_sum{each}"
        )
    if kwargs.get("device") is not None:
        raise PlacementError(
            f"{name} got device={kwargs['device']!r} and a placement: the placement already sets "
            f"the devices; leave out device"
        )
    if kwargs.get("out") is not None:
        raise PlacementError(
            f"{name} got out= and a placement: the tensor passed as out already has a layout; "
            f"leave out one of the two"
        )


def _has_layout(out: Any, placement: Any, sbp: Any) -> bool:
    """Return True if ``placement`` and ``sbp`` are those that the tensor ``out`` has already."""
    return (
        isinstance(out, GlobalTensor)
        and out.placement == placement
        and sbp is not None
        and out.sbp == as_layout(sbp, out.placement.axes)
    )


def _replace_by_numbers(value: Any) -> Any:
    """Replace global tensors, which represent numbers in these arguments, by their values.

    Returns the same pytree. Collective."""
    found = tensors_in(value, [])
    return (
        replaced(value, iter([t.item() if isinstance(t, GlobalTensor) else t for t in found]))
        if found
        else value
    )


def _run_on_meta(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run torch's own function on the meta device.

    It checks the arguments and infers shape and dtype."""
    return _plain_function(name)(
        *args,
        **{
            k: v for k, v in kwargs.items() if k not in ("generator", "requires_grad", "pin_memory")
        },
        device="meta",
    )  # type: ignore[no-any-return]


def _wrap_created(local: Tensor, spec: Spec, requires_grad: bool) -> GlobalTensor:
    out = GlobalTensor.wrap(local, spec)
    out._pinned = True
    if requires_grad:
        out.requires_grad_()
    return out


def _create(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], placement: Any, sbp: Any
) -> GlobalTensor:
    check_whole(name, placement, sbp, kwargs)
    if name not in (*_OF_DATA, "normal"):
        args, kwargs = _replace_by_numbers(args), _replace_by_numbers(kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "out") and v is not None}
    meta = _meta_result(name, args, kwargs)
    if meta.layout is not torch.strided:
        raise SbpError(
            f"{name} got layout={meta.layout}: a global tensor is dense; leave out layout"
        )
    spec = Spec.make(meta.shape, meta.dtype, placement, sbp)
    grad, pinned = kwargs.pop("requires_grad", False), kwargs.pop("pin_memory", False)
    local = MAKE[name](spec, args, kwargs)
    out = _wrap_created(local.pin_memory() if pinned else local, spec, grad)
    record(f"{name} {argument_text((args, kwargs))}", out)
    return out


def _meta_result(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a meta tensor with the result's shape and dtype."""
    if name == "normal" and any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        mean, std = _argument(args, kwargs, 0, "mean"), _argument(args, kwargs, 1, "std", 1.0)
        return torch.normal(*(a.to("meta") if isinstance(a, Tensor) else a for a in (mean, std)))
    return _run_on_meta(name, args, kwargs)


def _create_from_global(
    name: str,
    data: GlobalTensor,
    dtype: Any = None,
    device: Any = None,
    *,
    requires_grad: bool = False,
    pin_memory: bool = False,
    **where: Any,
) -> GlobalTensor:
    """Create a tensor from a global one.

    ``tensor`` returns a copy that is a leaf. ``as_tensor`` returns the tensor itself if nothing
    changes. Both keep the placement and sbp of ``data`` unless others are passed."""
    placement, _ = _placement_like(name, data, where["placement"], {"device": device})
    x = to_global(data.detach().clone() if name == "tensor" else data, placement, where["sbp"])
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise TypeError(
            f"{name}(): argument 'dtype' must be torch.dtype, not {type(dtype).__name__}"
        )
    x = x if dtype is None else x.to(dtype)
    x = x.pin_memory() if pin_memory else x
    return x.requires_grad_() if requires_grad else x  # type: ignore[no-any-return]


def _creator(name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def create(
        *args: Any,
        placement: Placement | None = None,
        sbp: Sbp | Sequence[Sbp] | None = None,
        **kwargs: Any,
    ) -> Any:
        if name in _OF_DATA and isinstance(args[0] if args else kwargs.get("data"), GlobalTensor):
            return _create_from_global(name, *args, placement=placement, sbp=sbp, **kwargs)
        if placement is None and sbp is None:
            placement, sbp = GLOBALLY.get()
            if placement is None or kwargs.get("out") is not None:
                return plain(*args, **kwargs)
            if _device_type_matches(kwargs.get("device"), placement):
                kwargs.pop("device", None)
        elif _has_layout(kwargs.get("out"), placement, sbp):
            return plain(*args, **kwargs)
        return make(*args, placement=placement, sbp=sbp, **kwargs)

    @functools.partial(visible, name=name, alone=plain)
    def make(*args: Any, placement: Any, sbp: Any, **kwargs: Any) -> Any:
        return _create(name, args, kwargs, placement, sbp)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = (
        f"Run ``torch.{name}``; return a global tensor if ``placement`` and ``sbp`` are passed "
        f"(both or neither).\n\n"
        "    Sizes are global. The values are those of one device, random ones too. On a "
        "partial_sum axis coordinate 0 holds the values, and the others hold zeros.\n"
        "    Raises PlacementError, SbpError.\n    "
    )
    return create


ones = _creator("ones")
zeros = _creator("zeros")
empty = _creator("empty")
full = _creator("full")
eye = _creator("eye")
arange = _creator("arange")
linspace = _creator("linspace")
logspace = _creator("logspace")
tensor = _creator("tensor")
as_tensor = _creator("as_tensor")
scalar_tensor = _creator("scalar_tensor")
tril_indices = _creator("tril_indices")
triu_indices = _creator("triu_indices")
bartlett_window = _creator("bartlett_window")
blackman_window = _creator("blackman_window")
hamming_window = _creator("hamming_window")
hann_window = _creator("hann_window")
kaiser_window = _creator("kaiser_window")
rand = _creator("rand")
randn = _creator("randn")
randint = _creator("randint")
normal = _creator("normal")
randperm = _creator("randperm")

# ------------------------------------------------------------------------------ like another tensor

LIKES: Final = (
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)


def _create_like(
    name: str,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    placement: Any = None,
    sbp: Any = None,
) -> GlobalTensor:
    """Create a tensor with the shape and dtype of ``x``.

    A global ``x`` also determines placement and sbp, unless they are passed. ``device`` then
    selects another device type of the same ranks."""
    layout: Any = sbp
    if isinstance(x, GlobalTensor):
        if sbp is None and (placement is None or placement.axes == x._spec.placement.axes):
            layout = x._spec.layout
            # Ops produce partial maxima and norms. Other values cannot all be of that kind.
            if any(e.is_partial and e is not partial_sum for e in layout):
                layout = tuple([broadcast if e.is_partial else e for e in layout])
        placement, kwargs = _placement_like(name, x, placement, kwargs)
    check_whole(name, placement, layout, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    spec, grad = (
        Spec.make(x.shape, kwargs.get("dtype", x.dtype), placement, layout),
        kwargs.pop("requires_grad", False),
    )
    if isinstance(x, GlobalTensor) and layout is x._spec.layout and placement is x._spec.placement:
        spec = x._spec.replace(dtype=spec.dtype)  # the stored layout too
    base = name.removesuffix("_like")
    factory_kwargs = {
        k: v
        for k, v in kwargs.items()
        if k not in ("dtype", "device", "layout", "memory_format", "pin_memory")
    }
    if (
        base in ("empty", "full", "ones", "zeros")
        and isinstance(x, GlobalTensor)
        and spec.replace(dtype=x.dtype) is x._spec
    ):
        # Torch's own function on the local tensor preserves its strides, which optimizers want for
        # their state.
        strides = _strides_like(x, kwargs)
        if placement.coordinate(world().rank) is None:
            kwargs.pop("memory_format", None)  # the placeholder has other dims
        local = draws.zero_unless_owner(getattr(torch, name)(x._stored, *args, **kwargs), spec)
    elif base in FILL and (strides := _strides_like(x, kwargs)) is not None:
        local = draws.fill_in_order(
            spec, FILL[base](args, factory_kwargs), strides, factory_kwargs.get("generator")
        )
    else:
        strides, sizes = None, (tuple(spec.shape),) if base == "full" else ()
        local = MAKE[base](spec, (*sizes, *args), factory_kwargs)
    out = _wrap_created(local, spec, grad)
    if strides is not None:
        note_order(out, strides)
    if sbp is None and isinstance(x, GlobalTensor) and any(e.is_partial for e in spec.layout):
        out._pinned = x._pinned  # partial because an op's result is: no choice of the user
    record(f"{name} {argument_text((args, factory_kwargs))}", out)
    return out


def _strides_like(x: Tensor, kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the strides that torch gives a tensor like ``x``, or None for row-major."""
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    if memory_format is torch.preserve_format:
        return strides_like(x) if isinstance(x, GlobalTensor) else None
    strides = format_strides(x.shape, memory_format)
    return None if strides == by_rows(x.shape) else strides


def _device_type_matches(device: Any, placement: Placement) -> bool:
    """Return True if ``device`` agrees with the placement's device type, or is None.

    Models pass ``device=x.device`` on, which does not conflict with a placement of that type."""
    return device is None or torch.device(device).type == placement.type


def _placement_like(
    name: str, x: GlobalTensor, placement: Placement | None, kwargs: dict[str, Any]
) -> tuple[Placement, dict[str, Any]]:
    """Return the placement of a tensor made like ``x``, and the other arguments.

    As in ``x.to``, a device alone selects its type, and the ranks remain the same. Raises
    PlacementError if the device type differs from the placement's."""
    device = kwargs.get("device")
    if placement is None:
        placement = (
            x._spec.placement
            if device is None
            else x._spec.placement.with_type(device_type(device))
        )
    if not _device_type_matches(device, placement):
        raise PlacementError(
            f"{name} got device={device!r} and {placement!r}: the placement already sets the "
            f"devices; leave out device"
        )
    return placement, {k: v for k, v in kwargs.items() if k != "device"}


def _like_creator(name: str) -> Callable[..., Any]:
    plain = getattr(torch, name)

    def create(
        input: Tensor,
        *args: Any,
        placement: Placement | None = None,
        sbp: Sbp | Sequence[Sbp] | None = None,
        **kwargs: Any,
    ) -> Any:
        if placement is None and sbp is None:
            return plain(input, *args, **kwargs)
        return make(input, *args, placement=placement, sbp=sbp, **kwargs)

    @functools.partial(visible, name=name, alone=plain)
    def make(x: Tensor, *args: Any, placement: Any, sbp: Any, **kwargs: Any) -> Any:
        return _create_like(name, x, args, kwargs, placement, sbp)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = (
        f"Run ``torch.{name}``; return a global tensor for a global input, or if ``placement`` "
        f"and ``sbp`` are passed. Raises PlacementError, SbpError."
    )
    return create


empty_like = _like_creator("empty_like")
full_like = _like_creator("full_like")
ones_like = _like_creator("ones_like")
rand_like = _like_creator("rand_like")
randint_like = _like_creator("randint_like")
randn_like = _like_creator("randn_like")
zeros_like = _like_creator("zeros_like")

NEW: Final = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _create_new(
    name: str, x: GlobalTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GlobalTensor:
    """Create a tensor for ``x.new_ones(...)``.

    It has the placement and dtype of ``x``, and is broadcast, unless others are passed.

    If ``x`` is plain, global tensors among the arguments are sizes."""
    if not isinstance(x, GlobalTensor):
        return getattr(x, name)(*_replace_by_numbers(args), **_replace_by_numbers(kwargs))  # type: ignore[no-any-return]
    kwargs = dict(kwargs)
    placement, kwargs = _placement_like(name, x, kwargs.pop("placement", None), kwargs)
    if name == "new_tensor" and isinstance(args[0] if args else kwargs.get("data"), GlobalTensor):
        return _create_from_global(
            "tensor", *args, **{"dtype": x._spec.dtype, "sbp": None, **kwargs}, placement=placement
        )
    sbp = kwargs.pop("sbp", None) or [broadcast] * placement.axes
    base = name.removeprefix("new_")
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = x._spec.dtype
    return _create(base, args, kwargs, placement, sbp)


def _method(name: str) -> Callable[..., Any]:
    def new(self: GlobalTensor, *args: Any, **kwargs: Any) -> GlobalTensor:
        return _create_new(name, self, args, kwargs)

    new = visible(new, name)
    new.__doc__ = (
        f"Run ``torch.Tensor.{name}``; the result is broadcast on the placement of this tensor, "
        f"unless ``placement`` and ``sbp`` are passed."
    )
    return new


# Separate methods, because torch's parser would refuse placement= and sbp=.
for _name in NEW:
    setattr(GlobalTensor, _name, _method(_name))


def _create_into_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a creation function with a global ``out=``, as in ``torch.eye(n, out=x)``.

    The values are written in the layout of ``x``. Without ``out`` the sizes are global tensors, as
    in ``torch.zeros(n, 3)``."""
    target = kwargs.get("out")
    if target is None:
        return func(*_replace_by_numbers(args), **_replace_by_numbers(kwargs))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("out", "device", "requires_grad")}
    value = _create(
        func.__name__,
        args,
        {"dtype": target._spec.dtype, **kwargs},
        target._spec.placement,
        target._spec.layout,
    )
    with torch.no_grad():
        target.copy_(value)
    return target


def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.fill_(value)`` or ``x.zero_()``: every local tensor is filled.

    On a partial_sum axis coordinate 0 holds the value, the others hold zeros."""
    x = args[0]
    value = 0 if func.__name__ == "zero_" else _argument(args, kwargs, 1, "value")
    if isinstance(value, Tensor):  # copy_ computes gradients of the value
        return x.copy_(value if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype))
    unpartial_norm_target(func.__name__, x, isinstance(value, (int, float)) and value >= 0)
    if any(e.is_partial for e in x._spec.layout):  # most ranks write zeros instead
        check_number(value, x._spec.dtype)
    x._local.fill_(value if draws.owns_value(x._spec) else 0)
    record(f"{func.__name__} {argument_text(value)}", x)
    return finish_inplace(x)


def _handler(make: Callable[..., GlobalTensor], name: str) -> Handler:
    return lambda func, args, kwargs: make(name, args[0], args[1:], kwargs)


def _refuse_nested(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise KernelError(dense_message(f"the function {func.__name__}"))


register_handlers(dict.fromkeys(torch_private.nested_constructors(), _refuse_nested), "refused")
register_handlers({Tensor.to_mkldnn: _refuse_nested}, "refused")


def _to_dense(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.to_dense()``. The local tensor of a result of ``to_sparse`` is sparse."""
    x = args[0]
    local = func(x._local, *args[1:], **kwargs)
    if local is x._local:
        return x
    return GlobalTensor.wrap(local, x._spec.replace(dtype=local.dtype))


register_handlers({Tensor.to_dense: _to_dense}, "method")


def _refuse_quantized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise KernelError(
        f"a global tensor reached torch.{func.__name__}, which makes a quantized tensor of it, but "
        "global tensors hold no quantized numbers. Use x.to_local() for a quantized tensor of this "
        "rank's values, or x.to_global(sbp=flow.sbp.broadcast).to_local() for one of the full "
        "value. x.to(torch.float8_e4m3fn) and (x / scale).round().to(torch.int8) are global "
        "tensors of small numbers"
    )


_QUANTIZING = ("quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic")
register_handlers(
    dict.fromkeys([getattr(torch, name) for name in _QUANTIZING], _refuse_quantized), "refused"
)
# random_streams.py handles ``torch.normal`` of tensors. ``linspace`` between tensors has a rule.
register_handlers(
    {
        **{
            getattr(torch, n): _create_into_out
            for n in MAKE
            if n not in (*_OF_DATA, "normal", "linspace", "logspace")
        },
        **{getattr(torch, n): _handler(_create_like, n) for n in LIKES},
        **{getattr(Tensor, n): _handler(_create_new, n) for n in NEW},
        **dict.fromkeys((Tensor.fill_, torch.fill_, Tensor.zero_, torch.zero_), _fill),
    },
    "creation",
)
register_lazy_functions([*(getattr(torch, n) for n in LIKES), *(getattr(Tensor, n) for n in NEW)])
__all__ = [*sorted(n for n in MAKE), *LIKES]
