"""``module.to_global`` and ``module.to_local``: convert all parameters and buffers of a module.

Users call them on modules, and `parallelize` uses `SameModel`."""

from __future__ import annotations

import difflib
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.patches import patch
from .._base.user_code import user_line, warn_user
from .._tensor.convert import check_placement
from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients.parameter_gather import to_logical
from .._tensor.pending_tensor import local_of
from .._tensor.set_data import become_global, become_plain, replace_local, set_data
from .._tensor.view_tracking import link_alias
from ..distributed.world import world
from ..errors import DivergenceError, GlobalTensorError, SbpError, ShapeError, StorageError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, as_layout, broadcast
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import TensorKind, parameter_described, refuse
from .shared_storage import find_shared_memory, overlap_message

__all__ = ["SameModel", "module_to_global", "module_to_local"]

SbpChoice = Sbp | Sequence[Sbp] | Mapping[str, Any] | Callable[..., Any]


def _slots(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (path, dict, name) for each parameter or buffer, in the order of the modules."""
    for prefix, m in module.named_modules(remove_duplicate=False):
        for held in (m._parameters, m._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield f"{prefix}.{name}".lstrip("."), held, name


def sbp_for(choice: SbpChoice, path: str, tensor: torch.Tensor, axes: int) -> list[Sbp]:
    """Return the sbp of one tensor. If ``choice`` has path patterns, the first match counts."""
    if isinstance(choice, Mapping):
        for pattern, value in choice.items():
            if fnmatch.fnmatchcase(path, pattern):
                return list(as_layout(value, axes, f"sbp of {pattern!r}"))
        raise SbpError(
            f"no pattern matches {path!r} (patterns: {', '.join(map(repr, choice))}): add a last "
            f'entry "*": flow.sbp.broadcast'
        )
    if callable(choice) and not isinstance(choice, Sbp):
        return list(
            as_layout(choice(path, tensor), axes, f"sbp that the callable gave for {path!r}")
        )
    layout = as_layout(choice, axes)
    # One sbp for all: a tensor without that dim (a bias, a counter) is broadcast instead.
    return [
        broadcast if e.is_split and not -tensor.dim() <= e.dim < tensor.dim() else e for e in layout
    ]


def _warn_of_misspelt(patterns: Collection[str], paths: Sequence[str]) -> None:
    """Warn of patterns that match nothing because a name in them is misspelt.

    Other patterns may match nothing: a table of patterns may serve several models.
    """
    known = {name for path in paths for name in path.split(".")}
    named = [pattern for pattern in patterns if pattern != "*"]
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            continue
        parts = pattern.split(".")
        for i, part in enumerate(parts):
            name = part.strip("*")
            near = difflib.get_close_matches(name, known, 1, 0.7)
            if not near or name in known or name.isdigit():
                continue
            right = ".".join((*parts[:i], part.replace(name, near[0]), *parts[i + 1 :]))
            meant = [path for path in paths if fnmatch.fnmatchcase(path, right)]
            # those that another pattern matches are not left out
            if any(not any(fnmatch.fnmatchcase(path, p) for p in named) for path in meant):
                warn_user(
                    f"the pattern {pattern!r} matches no parameter or buffer: did you mean "
                    f"{right!r}?"
                )
                break


def _resolve_layout(
    placement: Placement | None, sbp: SbpChoice | None, what: str, path: str, tensor: torch.Tensor
) -> tuple[Placement, list[Sbp]]:
    """Return placement and sbp of one tensor.

    This runs before any change, so that an error leaves the module as it was."""
    if (placement is None or sbp is None) and not isinstance(tensor, GlobalTensor):
        raise SbpError(
            f"module.to_global needs placement and sbp, as {what} is local: "
            f"module.to_global(flow.placement.all('cpu'), flow.sbp.broadcast)"
        )
    where = tensor.placement if placement is None else placement  # type: ignore[attr-defined]
    layout = tensor.sbp if sbp is None else sbp_for(sbp, path, tensor, where.axes)  # type: ignore[attr-defined]
    try:
        Spec.make(tensor.shape, tensor.dtype, where, as_layout(layout, where.axes))
    except SbpError as error:
        raise SbpError(f"{what}: {error}") from None
    return where, list(layout)


def module_to_global(
    self: torch.nn.Module, placement: Placement | None = None, sbp: SbpChoice | None = None
) -> torch.nn.Module:
    """Make every parameter and buffer global, in place, and return the module.

    The local tensors are full values of the same model on every rank, and the first rank's data
    counts. Tensors on the meta device have no data and stay there. ``module.to_empty(device=...)``
    then gives each rank memory for its local tensors. ``sbp``: one for all; a callable ``(path,
    tensor) -> sbp``; or ordered path patterns, ``{"*.q_proj.weight": split(0), "*": broadcast}``.
    Tensors that are global already are boxed. For these, a placement or sbp that is not passed
    stays the same.

    Parameters and buffers remain the same objects, so optimizers, hooks and references made before
    refer to the trained tensors. Raises KindError if a parameter cannot be global (sparse,
    quantized, not initialized), ShapeError if the ranks' models differ, SbpError, and
    PlacementError. After an error the module is as it was before.
    """
    if placement is not None:
        check_placement(placement)
    return SameModel(self, placement, "module.to_global").lay_out(sbp)


class SameModel:
    """A module that the ranks have agreed on.

    It has the same tensors on each rank, all of which can be global on ``placement``."""

    def __init__(self, module: torch.nn.Module, placement: Placement | None, purpose: str) -> None:
        """Compare the tensors of all ranks, before any change or communication of data.

        ``purpose``: the function that needs it. Raises KindError, ShapeError and DivergenceError
        on every rank."""
        self.module, self.placement, self.slots = module, placement, list(_slots(module))
        tensors = [(path, held[name]) for path, held, name in self.slots]
        self.bare = _check_same_model(
            type(module).__name__,
            tensors,
            0 if placement is None else placement.flat[0],
            purpose,
        )
        # The first rank's data counts, and so does the memory that its tensors share.
        first_rank = 0 if placement is None else placement.flat[0]
        own_shared, this_world = find_shared_memory(tensors), world()
        shared = this_world.comm(tuple(range(this_world.size))).all_gather_object(
            own_shared, purpose
        )[first_rank]
        if shared.overlap is not None:
            message = overlap_message(type(module).__name__, shared.overlap)
            raise StorageError(f"{user_line()}\n{purpose}: {message}")
        self.owners: dict[str, str] = shared.owners

    def lay_out(self, sbp: SbpChoice | None) -> torch.nn.Module:
        """Make the tensors global, each with the sbp from `sbp_for`, and return the module."""
        if isinstance(sbp, Mapping):
            _warn_of_misspelt(sbp, [path for path, _, _ in self.slots])
        plans = {
            path: _resolve_layout(
                self.placement, sbp, f"{path} of {type(self.module).__name__}", path, held[name]
            )
            for path, held, name in self.slots
        }
        first: dict[torch.Tensor, str] = {}  # the first place of a tensor in several places counts
        for path, held, name in self.slots:
            first.setdefault(held[name], path)
        tensors = {path: old for old, path in first.items()}
        # an owner of memory becomes global before the tensors that share it
        for path, old in sorted(tensors.items(), key=lambda item: item[0] in self.owners):
            owner_path = self.owners.get(path, path)
            where, layout = plans[owner_path]
            where = where.with_type("meta") if owner_path in self.bare else where
            if owner_path != path:
                _share_memory(old, tensors[owner_path])  # type: ignore[arg-type]
            elif isinstance(old, GlobalTensor):
                set_data(old, _copy_to_global(old, where, layout))
            else:
                grad = _moved_grad(old, where, layout)
                become_global(old, _copy_to_global(old, where, layout), grad)
        for part in self.module.modules():
            torch_private.refresh_weights(part)
        return self.module


def _share_memory(old: torch.Tensor, owner: GlobalTensor) -> None:
    """Make ``old`` a global tensor that shows the memory of ``owner``, in its layout."""
    grad = _moved_grad(old, owner.placement, list(owner.sbp))
    if isinstance(old, GlobalTensor):
        # not set_data, after which a write into one would not count as a write into the other
        replace_local(old, local_of(owner).detach(), owner._spec)
        if grad is not None:
            old.grad = grad
    else:
        become_global(old, owner, grad)
    link_alias(owner, old)  # type: ignore[arg-type]


def _moved_grad(old: torch.Tensor, placement: Placement, layout: list[Sbp]) -> GlobalTensor | None:
    """Return the gradient of a leaf as a global tensor, or None if it has none.

    A plain gradient without a graph stays the same object, as the parameter does."""
    grad = old.grad if old.is_leaf and old.requires_grad else None
    if grad is None:
        return None
    value = _copy_to_global(grad, placement, layout)
    if type(grad) is not torch.Tensor or grad.requires_grad:
        return value
    become_global(grad, value)
    return grad  # type: ignore[return-value]


def _copy_to_global(old: torch.Tensor, placement: Placement, layout: list[Sbp]) -> GlobalTensor:
    """Return the value of ``old`` as a global tensor with separate memory."""
    with torch.no_grad():
        value = old.detach()
        if not isinstance(value, GlobalTensor):
            # The first rank's data counts: allocate memory to receive it.
            if placement.type == "meta" or value.is_meta:
                value = torch.empty_like(value, device=world().device(placement.type))
            value = value.to_global(placement, [broadcast] * placement.axes, check_meta=False)  # type: ignore[attr-defined]
        new: GlobalTensor = value.to_global(placement, layout)._materialize()
        if new._local is old or new._local.data_ptr() == local_of(old).data_ptr():
            new = new.clone()
        elif (
            new._local.numel() * new._local.element_size() != new._local.untyped_storage().nbytes()
        ):
            new = new.clone()  # a slice would keep the full tensor alive
    return new


def _check_same_model(
    module: str, tensors: list[tuple[str, torch.Tensor]], first: int, purpose: str
) -> set[str]:
    """Return the paths of tensors on the meta device of the first rank, which have no data.

    Raises KindError and ShapeError on every rank if a tensor cannot be global or the models
    differ. Raises DivergenceError if they have the tensors in another order, or tied otherwise."""
    this_world = world()
    own_kinds = {path: parameter_described(t) for path, t in tensors}
    bare = {
        path
        for path, t in tensors
        if (t._spec.placement.type == "meta" if isinstance(t, GlobalTensor) else t.is_meta)
    }
    first_path: dict[torch.Tensor, str] = {}
    own_ties = [first_path.setdefault(t, path) for path, t in tensors]
    rank_models = [(own_kinds, bare, own_ties)]
    if this_world.size > 1:
        rank_models = this_world.comm(tuple(range(this_world.size))).all_gather_object(
            (own_kinds, bare, own_ties), purpose
        )
    if any(isinstance(kind, TensorKind) for theirs, *_ in rank_models for kind in theirs.values()):
        for path in dict.fromkeys(path for theirs, *_ in rank_models for path in theirs):
            refuse(
                f"{path} of {module}",
                {rank: theirs.get(path) for rank, (theirs, *_) in enumerate(rank_models)},
            )
    for rank, (theirs, *_) in enumerate(rank_models):
        if theirs != own_kinds:
            own_only, peer_only = (
                [m for m in own_kinds.items() if m not in theirs.items()],
                [t for t in theirs.items() if t not in own_kinds.items()],
            )
            raise ShapeError(
                f"module.to_global: rank {this_world.rank} and rank {rank} hold different models: "
                f"rank {this_world.rank} has {own_only[:3]}, "
                f"rank {rank} has {peer_only[:3]}; "
                "build the same module on every rank"
            )
    paths, _, ties = rank_models[0]
    for rank, (peer_paths, _, peer_ties) in enumerate(rank_models):
        for i, (path, peer_path) in enumerate(zip(paths, peer_paths, strict=True)):
            if path != peer_path:
                raise DivergenceError(
                    f"{user_line()}\n{purpose}: the ranks have registered the tensors of {module} "
                    f"in different orders: number {i} is {path} on rank 0 and {peer_path} on rank "
                    f"{rank}. Register modules, parameters and buffers in the same order on every "
                    f"rank"
                )
        for path, tie, peer_tie in zip(paths, ties, peer_ties, strict=True):
            if tie != peer_tie:
                tied = [
                    f"on rank {r} it is {'a tensor of its own' if t == path else f'tied to {t}'}"
                    for r, t in ((0, tie), (rank, peer_tie))
                ]
                raise DivergenceError(
                    f"{user_line()}\n{purpose}: the ranks have tied {path} of {module} "
                    f"differently: {', '.join(tied)}. Tie the same parameters on every rank, "
                    f"before this call"
                )
    return rank_models[first][1] if this_world.size > 1 else bare


def module_to_local(self: torch.nn.Module) -> torch.nn.Module:
    """Replace every global parameter and buffer by this rank's local tensor, in place.

    Returns the module. Parameters remain the same objects, as in ``to_global``."""
    done: dict[torch.Tensor, torch.Tensor] = {}
    for _, held, name in list(_slots(self)):
        old = held[name]
        if isinstance(old, GlobalTensor):
            if old not in done:
                done[old] = become_plain(old, to_logical(old._materialize())._local.detach())
            held[name] = done[old]
    for part in self.modules():
        torch_private.refresh_weights(part)
    return self


def _sync_batch_norm(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(self: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        """Run batch norm on global tensors: its statistics are those of the global batch.

        Torch's own SyncBatchNorm reads the input's device and calls its kernels, as for local
        tensors, and no tensor can override that."""
        if not any(isinstance(t, GlobalTensor) for t in (input, self.weight, self.running_mean)):
            return forward(self, input)
        if self.process_group is not None:
            raise GlobalTensorError(
                "SyncBatchNorm with a process_group got a global tensor, whose statistics are "
                "those of the global batch; leave out process_group, "
                "or run the module on local tensors with globaltensor.local_map"
            )
        # (an inherited forward: it does not check the number of dims)
        return torch.nn.BatchNorm1d.forward(self, input)  # type: ignore[arg-type]

    return run


def _to(to: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(to)
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Run ``module.to(x)`` for a global ``x``.

        PyTorch asks ``x`` for its device below Python, where a global tensor has none."""
        other = kwargs.get("tensor", args[0] if args else None)
        if not isinstance(other, GlobalTensor):
            return to(self, *args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "tensor"}
        return to(self, other.placement.type, other.dtype, *args[1:], **rest)

    return run


def install() -> None:
    """Patch torch.nn.Module: add ``to_global`` and ``to_local``, let ``to`` take global tensors."""
    patch("torch.nn:Module.to", _to)
    patch("torch.nn:SyncBatchNorm.forward", _sync_batch_norm)
    patch("torch.nn:Module.to_global", lambda before: module_to_global, missing=True)
    patch("torch.nn:Module.to_local", lambda before: module_to_local, missing=True)


install()
