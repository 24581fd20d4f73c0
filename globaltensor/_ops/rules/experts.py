"""Mixtures of experts: tokens are sent to the ranks of their experts, and the results return.

Users call `moe_experts`. The scheme is that of Lepikhin et al. 2021, "GShard: scaling giant models
with conditional computation and automatic sharding". There are no capacities here: no token is
dropped, and none is padded.

  tokens split, experts replicated  each rank computes its tokens; nothing moves
  tokens replicated, experts split  each rank computes its experts' share of every token; the
                                    result is partial
  both split on one axis            an all-to-all sends the tokens to their experts, another
                                    returns the results
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..._base import torch_private
from ...boxing import log
from ...distributed.world import world
from ...errors import ShapeError
from ...sharding.sbp import Sbp, broadcast
from .grouped_linear import gated
from .helpers import register, zeros_connected
from .notation import Arg, LocalContext, OpDescription, Signature

__all__ = ["TokenFunction", "moe_experts"]

#: (rows sorted by expert, number of rows of each expert, parameters...) -> results of the rows
Function = Callable[..., Tensor]


class TokenFunction(ABC):
    """A function for `moe_experts` that also accepts unsorted tokens.

    `moe_experts` passes unsorted tokens where this rank has all experts.
    """

    @abstractmethod
    def __call__(self, rows: Tensor, counts: Sequence[int], *parameters: Tensor) -> Tensor:
        """Return the results of rows that are sorted by expert."""

    @abstractmethod
    def run_all(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        """Return the weighted sums of the experts' results for each token, shaped like ``x``.

        ``index`` and ``weights`` are the experts of each token and their weights.
        """


def moe_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    *parameters: Tensor,
    function: Function = gated,
    shared: Sequence[Tensor] = (),
) -> Tensor:
    """Compute ``sum_j weights[t, j] * expert_{index[t, j]}(x[t])`` of every token t.

    Shapes: ``x`` [tokens, hidden] -> [tokens, hidden], of the dtype of ``x``. ``index``,
    ``weights`` [tokens, k]: the experts of each token and the weight of each. A number that is no
    expert's contributes nothing. ``parameters``: the first dim of each is the experts. By default
    they are ``gate_up [experts, 2 * inner, hidden]`` and ``down [experts, hidden, inner]`` for
    ``down(silu(gate) * up)``. ``shared``: parameters that all experts have in common.

    ``function(rows, counts, *parameters, *shared)``: another kind of expert, on local tensors.
    ``rows`` [n, hidden] are sorted by expert, and ``counts`` (integers) is the number of rows of
    each. The function returns the results, of the shape of ``rows``. Rows must not depend on each
    other. Pass the same function object at every call, because plans are cached by it.

    Parameters that are split(0) are never gathered for tokens that are split. Instead the tokens
    are sent to their experts in one all-to-all, and return in another; so do their gradients.
    Tokens that are broadcast stay, and the results are partial sums. Differentiable any number of
    times, if ``function`` is. Raises ShapeError for shapes that do not match.

    >>> import torch
    >>> x, index, weights = torch.ones(2, 4), torch.tensor([[0], [2]]), torch.ones(2, 1)
    >>> scale = torch.tensor([[1.0], [2.0], [3.0]])
    >>> moe_experts(x, index, weights, scale, function=lambda rows, counts, scale: rows * scale.repeat_interleave(torch.tensor(counts), 0))
    tensor([[1., 1., 1., 1.],
            [3., 3., 3., 3.]])
    """  # noqa: E501
    tensors = (x, index, weights, *parameters, *shared)
    if has_torch_function(tensors):
        return handle_torch_function(
            moe_experts, tensors, x, index, weights, *parameters, function=function, shared=shared
        )
    _check_inputs(x, index, weights, parameters)
    return _run_experts(
        x,
        index,
        weights,
        parameters,
        shared,
        function,
        _ExpertPlacement((0,), 0, ((0, parameters[0].shape[0]),), parameters[0].shape[0]),
    )


def _check_inputs(x: Tensor, index: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> None:
    if (
        x.ndim != 2
        or index.ndim != 2
        or index.shape != weights.shape
        or index.shape[0] != x.shape[0]
    ):
        found = ", ".join(str(list(t.shape)) for t in (x, index, weights))
        raise ShapeError(
            f"experts: x [tokens, hidden], index [tokens, k] and weights [tokens, k] are wanted, "
            f"got {found}"
        )
    if not parameters or any(
        not p.ndim or p.shape[0] != parameters[0].shape[0] for p in parameters
    ):
        raise ShapeError(
            f"experts: the first dim of every parameter is that of the experts, got "
            f"{', '.join(str(list(p.shape)) for p in parameters) or 'none'}"
        )


# ----------------------------------------------------------------------------------------- the rule

_T, _E = "tokens", "experts"


def _describe(
    op: OpDescription,
    x: Arg,
    index: Arg,
    weights: Arg,
    *parameters: Arg,
    function: Function = gated,
    shared: Sequence[Arg] = (),
) -> None:
    for a in (x, index, weights):
        op.set(a, (_T, None))
    for p in parameters:
        op.set(p, (_E, *[None] * (p.ndim - 1)))
    op.out = [(_T, None)]
    op.reduce = {_E: "sum"}
    op.exchanges = {_T, _E}
    which = {p.index for p in parameters}

    def menu(axis: int) -> list[Signature]:
        """Return the signatures that split tokens, or experts, or both."""
        derived = list(op.derived(axis))
        both = [
            Signature(tuple(e.ins[i] if i in which else t.ins[i] for i in range(len(op.args))),
                t.outs, _T)
            for t in derived for e in derived if t.factor == _T and e.factor == _E
        ]  # fmt: skip
        return [
            *(s for s in derived if s.factor is not None),
            *both,
            *(s for s in derived if s.factor is None),
        ]

    op.menu = menu
    op.local = lambda split: _local_experts(split, x.index, parameters[0].index)


def _local_experts(split: LocalContext, tokens: int, parameters: int) -> Callable[..., Tensor]:
    """Return the function that a rank runs, with an exchange along the axes that split both."""
    held, spec = split.ins[tokens].layout, split.ins[parameters]
    axes = [a for a, e in enumerate(spec.layout) if _splits_dim0(e) and _splits_dim0(held[a])]
    ranks = spec.placement.fiber(split.rank, axes) if axes else (split.rank,)
    boxes = [spec.box(r) for r in ranks]
    homes = _ExpertPlacement(
        ranks,
        ranks.index(split.rank),
        tuple((offsets[0], lengths[0]) for offsets, lengths in boxes),
        spec.shape[0],
    )

    def run(
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        *own: Tensor,
        function: Function = gated,
        shared: Sequence[Tensor] = (),
    ) -> Tensor:
        return _run_experts(x, index, weights, own, shared, function, homes)

    return run


def _splits_dim0(entry: Sbp) -> bool:
    return entry is not broadcast and entry.is_split and entry.dim == 0


register(moe_experts, _describe)


# -------------------------------------------------------------------------------- local computation

EXCHANGE: Final = "experts: tokens to their experts, and back"


@dataclass(frozen=True)
class _ExpertPlacement:
    """The assignment of experts to ranks.

    ``held`` is (offset, length) for each of ``ranks``, among ``count`` experts. ``me`` is the index
    of this rank among ``ranks``.
    """

    ranks: tuple[int, ...]
    me: int
    held: tuple[tuple[int, int], ...]
    count: int

    @cached_property
    def starts(self) -> list[int]:
        """The start of each rank's experts in the order by rank, and last the number of experts."""
        return [0, *accumulate(n for _, n in self.held)]

    def places(self, index: Tensor) -> Tensor:
        """Return the position of each expert in the order by rank.

        An expert that these ranks do not have gets the position past the end.
        """
        known = torch.where((index >= 0) & (index < self.count), index, self.count)
        return known if self.straight else torch.tensor(self.order, device=index.device)[known]

    @cached_property
    def straight(self) -> bool:
        """Return True if these ranks have all experts, in ascending order."""
        return self.order == list(range(self.count + 1))

    @cached_property
    def order(self) -> list[int]:
        """The position of each expert in the order by rank, and last the position for no expert."""
        order = [self.starts[-1]] * (self.count + 1)
        for start, (offset, n) in zip(self.starts, self.held, strict=False):
            order[offset : offset + n] = range(start, start + n)
        return order


def _run_experts(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Sequence[Tensor],
    shared: Sequence[Tensor], function: Function, homes: _ExpertPlacement
) -> Tensor:  # fmt: skip
    every = [x, weights, *parameters, *shared]
    # The routing of tokens depends on data, but the shape of the result does not. A recorder must
    # see the data dependence, so that it records the call as one step.
    if x.device.type == "meta" or (
        torch_private.is_fake(x) and not torch_private.function_mode_on()
    ):
        return zeros_connected(tuple(x.shape), x.dtype, every)
    if isinstance(function, TokenFunction) and homes.held == ((0, homes.count),) and x.shape[0]:
        return _check_result(function.run_all(x, index, weights, *parameters, *shared), x, every)
    with log.exchanges(EXCHANGE):
        return _dispatch_and_combine(x, index, weights, parameters, shared, function, homes)


def _dispatch_and_combine(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Sequence[Tensor],
    shared: Sequence[Tensor], function: Function, homes: _ExpertPlacement
) -> Tensor:  # fmt: skip
    """Return the weighted sum of the experts' results for each token.

    The ranks send the tokens to the ranks of their experts, and receive the results. Collective.
    """
    t, k = index.shape
    kind = _transfer_dtype(x)
    place = homes.places(index).view(-1)
    order = place.argsort(stable=True)
    routing = _RowRouting.make(
        place.bincount(minlength=homes.starts[-1] + 1)[:-1], homes, x.shape[1] * kind.itemsize
    )
    order = order[: sum(routing.sent)]  # the other rows have no expert on these ranks
    rows = x.to(kind).index_select(0, order // max(k, 1))
    rows = routing.send_rows(rows)
    results = routing.return_results(
        _compute_rows(function, rows, routing.counts, parameters, shared)
    )
    each = results.new_zeros(t * k, x.shape[1]).index_copy(0, order, results).view(t, k, x.shape[1])
    return (each * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _transfer_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which tokens are sent: the one to which autocast would cast them."""
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def _compute_rows(
    function: Function,
    rows: Tensor,
    counts: list[int],
    parameters: Sequence[Tensor],
    shared: Sequence[Tensor],
) -> Tensor:
    """Return the results of ``function``.

    A rank without rows returns an empty result that stays in the graph, because its backward joins
    the exchanges.
    """
    inputs = [rows, *parameters, *shared]
    if not rows.shape[0]:
        return zeros_connected(tuple(rows.shape), rows.dtype, inputs)
    return _check_result(function(rows, counts, *parameters, *shared), rows, inputs)


def _check_result(out: Tensor, rows: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return a function's results for ``rows``, of the rows' shape and dtype, and in the graph.

    Raises ShapeError for another shape.
    """
    if out.shape != rows.shape:
        raise ShapeError(
            f"experts: the function returned shape {list(out.shape)} for rows of shape "
            f"{list(rows.shape)}; it must keep their shape"
        )
    out = out.to(rows.dtype)
    if torch.is_grad_enabled() and not out.requires_grad and any(i.requires_grad for i in inputs):
        return out + zeros_connected((), out.dtype, inputs)
    return out


# ------------------------------------------------------------------------------- exchange of tokens


@dataclass(frozen=True)
class _RowRouting:
    """The routing of rows between ranks.

    ``sent``: rows sent to each rank. ``taken``: rows received from each rank. ``counts``: rows of
    each own expert. ``longest``: rows that the busiest rank sends or receives. ``sorting``: the
    order of the received rows by expert, or None where they arrive in that order.
    """

    ranks: tuple[int, ...]
    sent: tuple[int, ...]
    taken: tuple[int, ...]
    longest: int
    counts: list[int]
    sorting: Tensor | None

    @staticmethod
    def make(row_counts: Tensor, homes: _ExpertPlacement, row_bytes: int) -> _RowRouting:
        """Build the routing from the number of rows that this rank has for each expert.

        The call is collective: the ranks exchange these numbers.
        """
        p, starts = len(homes.ranks), homes.starts
        if p == 1:
            counts = row_counts.tolist()
            return _RowRouting(
                homes.ranks, (sum(counts),), (sum(counts),), sum(counts), counts, None
            )
        all_counts = torch.stack(
            world().comm(homes.ranks).all_gather(row_counts, [row_counts.numel()] * p)
        )
        # [rank that has the rows][expert, in the order of the ranks that have the experts]
        every: list[list[int]] = all_counts.tolist()
        parts = [slice(a, b) for a, b in pairwise(starts)]
        table = [[sum(row[part]) for part in parts] for row in every]
        own_experts = parts[homes.me]
        sent, taken = tuple(table[homes.me]), tuple(row[homes.me] for row in table)
        longest = max(max(map(sum, table)), max(map(sum, zip(*table, strict=True))))
        log.exchange(
            EXCHANGE,
            (sum(taken) + sum(sent) - 2 * sent[homes.me]) * row_bytes,
        )
        own = all_counts[:, own_experts]
        expert = (
            torch.arange(own.shape[1], device=row_counts.device)
            .repeat(p)
            .repeat_interleave(own.reshape(-1))
        )
        return _RowRouting(
            homes.ranks,
            sent,
            taken,
            longest,
            [sum(row[own_experts][e] for row in every) for e in range(own.shape[1])],
            expert.argsort(stable=True),
        )

    def send_rows(self, rows: Tensor) -> Tensor:
        """Send rows, sorted by destination, and return the received rows, sorted by expert."""
        if self.sorting is None:
            return rows
        return _Exchange.apply(rows, self.ranks, self.sent, self.taken, self.longest).index_select(
            0, self.sorting
        )  # type: ignore[no-any-return, no-untyped-call]

    def return_results(self, rows: Tensor) -> Tensor:
        """Send results back, in the reverse direction of `send_rows`."""
        if self.sorting is None:
            return rows
        rows = rows.index_select(0, self.sorting.argsort())
        return _Exchange.apply(rows, self.ranks, self.taken, self.sent, self.longest)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """An exchange of rows [n, ...], sorted by destination rank, for rows sorted by source rank.

    The backward is the same exchange in the reverse direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ranks: tuple[int, ...],
        sent: tuple[int, ...],
        taken: tuple[int, ...],
        longest: int,
    ) -> Tensor:
        ctx.way = ranks, taken, sent, longest
        width = math.prod(rows.shape[1:])
        out = rows.new_empty(sum(taken), *rows.shape[1:])
        parts = rows.detach().split_with_sizes(sent)
        world().comm(ranks).all_to_all_into(
            parts, [n * width for n in taken], out.view(-1), longest * width
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone() if torch_private.is_zero_tensor(grads[0]) else grads[0]
        with log.exchanges("backward of {}", EXCHANGE):
            return _Exchange.apply(grad, *ctx.way), None, None, None, None  # type: ignore[no-untyped-call]
