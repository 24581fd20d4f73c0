"""The options of the intra-operator search. The searches and the API make them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...boxing.moves import Layout, gathers
from ..ir.op_graph import Calls, Value

__all__ = ["Options", "is_gathered_twice"]


@dataclass(frozen=True)
class Options:
    """The options of a search.

    - ``computation``: the weight of computing relative to communication.
    - ``wait``: seconds that each change of layout costs in addition to the cluster's estimate.
    - ``collect``: whether several calls may share one change of layout.
    - ``optimizer_state_ratio``: bytes of optimizer state for each byte of a parameter.
    - ``memory``: the limit in bytes a rank; None means no limit.
    - ``fixed``: path of a given tensor -> the layouts it may have.
    - ``hidden``: the fraction of the gradients' traffic that hides behind computing (None: the
      cluster's own value).
    - ``summing``: 0 where the gradients' traffic hides behind the backward pass, which is longer;
      1 where the backward pass hides behind the traffic. Values in between give a lower bound of
      both (`inter_op.segment_cost.Weights`).
    - ``freed``: whether gathered parameters are freed after each use and gathered again in backward
      (`parameter_gather`). Otherwise autograd saves them.
    """

    computation: float = 1.0
    wait: float = 0.0
    collect: bool = True
    optimizer_state_ratio: float = 2.0
    memory: int | None = None
    fixed: dict[str, tuple[Layout, ...]] = field(default_factory=dict)
    hidden: float | None = None
    summing: float = 0.0
    freed: bool = False


def is_gathered_twice(
    calls: Calls, options: Options, value: Value, src: Layout, dst: Layout
) -> bool:
    """Return True if a change of a parameter's layout is made again in backward."""
    return options.freed and calls.training and value.saved and bool(gathers(src, dst))
