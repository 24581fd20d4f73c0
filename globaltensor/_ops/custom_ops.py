"""Operators made with torch.library that write into their arguments.

_ops/sharding_propagation.py and _ops/fallback.py plan such calls. An operator runs on the local
tensors, as any other does. If it writes into a copy that boxing made, the values are boxed back. A
plain tensor that it writes into has the full result on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from .._base import torch_private
from .._base.overridable import apply
from .._base.pytree import replaced, tensors_in
from .._base.refusals import kernel_message
from .._tensor.global_tensor import GlobalTensor
from .._tensor.view_tracking import RemoteView, mark_written
from ..boxing import box
from ..distributed.replicated_results import note_replicated
from ..distributed.world import sent, world
from ..errors import GlobalTensorError, KernelError
from ..sharding.spec import Spec
from .local_plan import LocalPlan
from .nonmember_placeholders import nonmember_outputs
from .replicated_plan import ReplicatedPlan, shared, wrapped_whole
from .rules import OpDescription

__all__ = ["Viewing", "Writing", "keep_written_whole", "needs_fake", "written_operands"]

_PLACEHOLDER = torch.empty(0)  # placeholder for a tensor


def written_operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the operands that an operator writes into, and the operands that it returns.

    The first tuple has the positions of the operands written into. The second has for each result
    the position of the operand that it is, or None. Raises KernelError for PyTorch's own operators,
    which have functions above them.
    """
    written_and_returned = (
        torch_private.written_arguments(func, args, kwargs)
        if torch_private.is_custom(func)
        else None
    )
    if written_and_returned is None:
        raise KernelError(kernel_message(f"the kernel {func}, which writes into its arguments"))
    position = {id(t): i for i, t in enumerate(tensors_in(kwargs, tensors_in(args, [])))}
    values, returns = written_and_returned
    return tuple(position[id(t)] for t in tensors_in(values, [])), tuple(
        position.get(id(r)) for r in returns
    )


def keep_written_whole(op: OpDescription, writes: Sequence[int]) -> None:
    """Restrict an operator's rule to layouts that are right for operands that it writes into.

    A rank that holds a share of a factor would write only its contribution into an operand without
    that factor. And the written values are no partial sum.
    """
    op.linear, op.addends = [], frozenset()
    for i in writes:
        op.whole = op.whole | {f for f in op.factors() if f not in op.dims[i]}


def needs_fake(func: Any) -> GlobalTensorError:
    """Return the error for an operator whose rule lacks a function for fake tensors."""
    return GlobalTensorError(
        f"the rule of {func} can't be used: the shape of the operator's result is unknown without "
        f"running it. Add a function for fake tensors, which torch.compile "
        "needs too: @torch.library.register_fake(...), or register_fake of the operator that "
        "torch.library.custom_op made; or run the operator on local tensors with "
        "globaltensor.local_map"
    )


def _copy_to_write(t: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a copy of an operand for an operator to write into: the boxed tensor may be a view.

    The copy of a leaf is a leaf: a kernel whose writes autograd sees must not write into it."""
    if t.is_leaf and t.requires_grad:
        return local.detach().clone().requires_grad_()
    return local.clone()


class Viewing(ReplicatedPlan):
    """A plan for an operator without a rule some of whose results are views of arguments.

    The operands are replicated. What is written into such a result is written into the argument,
    too. Of a list of tensors each result is taken for a view of the tensor at its place.
    """

    __slots__ = ()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().run(func, args, kwargs)
        tensors = tensors_in(kwargs, tensors_in(args, []))
        places = repeat(_PLACEHOLDER)  # drop the references to the bases
        given, named = replaced(args, places), replaced(kwargs, places)

        def taken_of(base: GlobalTensor, number: int) -> Any:
            others = [None if t is base else t for t in tensors]

            def taken(source: Any) -> Any:
                these = iter([source if t is None else t for t in others])
                out = func(*replaced(given, these), **replaced(named, these))
                return tensors_in(out, [])[number]

            return taken

        viewed = torch_private.viewed_arguments(func, args, kwargs)
        results = made if len(viewed) > 1 else [made]
        views: list[Any] = []
        for result, argument in zip(results, viewed, strict=True):
            bases = tensors_in(argument, [])
            for i, v in enumerate(tensors_in(result, [])):
                base = bases[0] if len(bases) == 1 else bases[i] if i < len(bases) else None
                if isinstance(v, GlobalTensor) and isinstance(base, GlobalTensor):
                    v = RemoteView.of(v._local, v._spec, base, taken_of(base, len(views)))
                views.append(v)
        return replaced(made, iter(views))


class Writing(LocalPlan):
    """A plan: box the operands, run on the local tensors, box back the written copies.

    ``writes``: the positions of the operands written into. ``returns``: for each result the
    position of the operand that it is, or None. Without a rule every operand is replicated, and the
    result's shapes are known after the operator has run.
    """

    __slots__ = ("returns", "ruled", "writes")

    def __init__(
        self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]
    ) -> None:
        super().__init__(name, src, dst, outs)
        self.writes: tuple[int, ...] = ()
        self.returns: tuple[int | None, ...] = ()
        self.ruled = True

    @classmethod
    def on_whole(cls, name: str, src: Sequence[Spec]) -> Writing:
        """Return the plan for an operator without a rule."""
        made = cls(name, src, [s.replicated() for s in src], [])
        made.ruled = False
        return made

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        locals_ = self.locals(tensors)
        copied = [i for i in self.writes if not self._in_place(i, tensors[i])]
        for i in copied:
            locals_[i] = _copy_to_write(tensors[i], locals_[i])
        # a tensor that is passed several times is one tensor for the operator, too
        owners = {id(tensors[i]): i for i in reversed(self.writes)}
        for i, t in enumerate(tensors):
            owner = owners.get(id(t), i)
            if self.dst[i] is self.dst[owner]:
                locals_[i] = locals_[owner]
        out = None
        if not self.outside:
            these = iter(locals_)
            new_args, new_kwargs = replaced(args, these), replaced(kwargs, these)
            out = (
                func(*new_args, **new_kwargs)
                if self.function is None
                else apply(self.function, new_args, new_kwargs)
            )
        with torch.no_grad():  # as in PyTorch: autograd does not see an operator's writes
            for i in self.writes:
                if i in copied:
                    self._copy_back(tensors[i], locals_[i], self.dst[i])
                elif isinstance(tensors[i], GlobalTensor):
                    mark_written(tensors[i])
                else:
                    note_replicated(tensors[i])
        if self.ruled:
            results = nonmember_outputs(self.outs, locals_) if self.outside else tensors_in(out, [])
            made = replaced(
                self.structure,
                iter([GlobalTensor.wrap(r, s) for r, s in zip(results, self.outs, strict=True)]),
            )  # type: ignore[arg-type]
        else:
            made = wrapped_whole(
                shared(out, self.src[0].placement, self.outside, locals_),
                self.src[0].placement,
                self.outside,
            )
        return self._with_arguments(made, tensors)

    def _in_place(self, i: int, t: torch.Tensor) -> bool:
        """Return True if the operator writes into the local tensor itself."""
        if self.routes[i] is not None or t.requires_grad:
            return False
        if isinstance(t, GlobalTensor):
            return type(t) is not RemoteView
        return (
            len(self.src[i].placement.flat) == world().size
            and t.device.type == self.src[i].placement.type
        )

    def _copy_back(self, t: torch.Tensor, local: torch.Tensor, spec: Spec) -> None:
        """Copy the written copy back into its operand. Collective."""
        if isinstance(t, GlobalTensor):
            t.copy_(GlobalTensor.wrap(local, spec))
            return
        whole = box(local, spec, spec.replicated(), why=self.name)
        if len(spec.placement.flat) < world().size:
            whole = apply(
                sent, (torch.empty_like(t) if self.outside else whole, spec.placement.flat[0]), {}
            )
        t.copy_(whole)
        note_replicated(t)

    def _with_arguments(self, made: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Replace results that are arguments of the call by these arguments."""
        if all(i is None for i in self.returns):
            return made
        several = isinstance(made, tuple)
        chosen = [
            r if i is None else tensors[i]
            for r, i in zip(made if several else [made], self.returns, strict=True)
        ]
        return tuple(chosen) if several else chosen[0]
