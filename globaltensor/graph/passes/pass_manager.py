"""The passes, their order, and the checks after each.

All ranks communicate in one order, which follows from the graph alone. `Graph` and `PipelinedGraph`
call `agreed`."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ...distributed.world import world
from ...errors import GraphError
from ..capture.dry_world import GRAPH
from ..program.coalesced import CoalescedCollective, StartCollective, WaitCollective
from ..program.nodes import BoxingCall, GatherCall
from .boxing_cse import eliminate_common_boxings
from .coalesce_collectives import coalesce_collectives
from .dead_code import remove_dead, remove_idle
from .defer_mean import defer_mean_count
from .fold_reductions import fold_all_reduces
from .overlap import overlap_collectives
from .remove_identity import remove_identities
from .simplify_boxing import simplify_boxings, unmoved

__all__ = ["PASSES", "PLAIN", "agreed", "meetings", "run", "same", "verify"]

Pass = Callable[[fx.Graph], None]
#: Passes that leave every boxing as it was recorded.
PLAIN: tuple[Pass, ...] = (remove_identities, remove_idle)
PASSES: tuple[Pass, ...] = (
    remove_identities, remove_dead, eliminate_common_boxings, simplify_boxings,
    eliminate_common_boxings, fold_all_reduces,
    defer_mean_count, coalesce_collectives, overlap_collectives, remove_dead,
)  # fmt: skip


def run(graph: fx.Graph, passes: Sequence[Pass] | None = None) -> None:
    """Run the passes in order; by default, all passes.

    Raises GraphError if a check after a pass fails."""
    for one in PASSES if passes is None else passes:
        one(graph)
        verify(graph, one.__name__)


def agreed(graphs: Mapping[int, fx.Graph]) -> dict[int, fx.Graph]:
    """Run all passes over the graphs of this rank, one for each of its stages, and return them.

    Ranks with different local tensors (an empty one, say) may have recorded programs for which a
    pass has another result. The ranks therefore compare the order in which they would communicate.
    If the orders differ, all ranks use graphs in which no pass has moved a boxing. Collective among
    all ranks. Raises GraphError if a pass fails on any rank."""
    this_world = world()
    if this_world.size == 1:
        for graph in graphs.values():
            run(graph)
        return dict(graphs)
    before = {k: copy.deepcopy(graph) for k, graph in graphs.items()}
    own_digests: dict[tuple[int, ...], str] = {}
    failed: Exception | None = None
    try:
        for graph in graphs.values():
            run(graph)
            for members, digest in meetings(graph, this_world.rank).items():
                own_digests[members] = own_digests.get(members, "") + digest
    except Exception as error:
        failed = error
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        (own_digests, str(failed) if failed is not None else ""), GRAPH
    )
    if failed is not None:
        raise failed  # the original error; the other ranks name this rank
    for rank, (_, error) in enumerate(everyone):
        if error:
            raise GraphError(f"a pass over the program of rank {rank} has failed: {error}")
    if same([digests for digests, _ in everyone]):
        return dict(graphs)
    for graph in before.values():
        run(graph, PLAIN)
    return before


def verify(graph: fx.Graph, after: str) -> None:
    """Check what must hold between passes.

    Every operand is made before it is used. Each boxing's operand has the layout that the boxing
    names. Each started collective is awaited once. Raises GraphError otherwise."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise GraphError(f"the pass {after} has produced an invalid graph: {error}") from error
    for node in graph.nodes:
        for given, src in _boxed_operands(node):
            lies = given.meta.get("box")
            if lies is not None and lies[1] is not src and not _same_local_tensors(lies[1], src):
                raise GraphError(
                    f"after the pass {after}, {node.name} expects {src!r}, but its operand is "
                    f"{lies[1]!r}"
                )
        if isinstance(node.target, StartCollective) and not _is_awaited_once(node):
            raise GraphError(
                f"after the pass {after}, {node.name} is not awaited once, but by "
                f"{[u.name for u in node.users]}"
            )
        if isinstance(node.target, CoalescedCollective) and any(
            u.target is not operator.getitem for u in node.users
        ):
            raise GraphError(
                f"after the pass {after}, the tuple of results of {node.name} is used without "
                "being unpacked"
            )


def _is_awaited_once(begun: fx.Node) -> bool:
    users = list(begun.users)
    return len(users) <= 1 and all(
        isinstance(u.target, WaitCollective) and u.target.joint is begun.target.joint for u in users
    )  # type: ignore[union-attr]


def _boxed_operands(node: fx.Node) -> list[tuple[fx.Node, object]]:
    """Return (operand, required spec) of the operands that a node boxes."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, BoxingCall):
        return [(node.args[0], node.target.src)]  # type: ignore[list-item]
    joint = node.target.joint if isinstance(node.target, StartCollective) else node.target
    return (
        [(a, src) for a, (src, _, _) in zip(node.args, joint.routes, strict=True)]
        if isinstance(joint, CoalescedCollective)
        else []
    )  # type: ignore[misc]


def _same_local_tensors(a: object, b: object) -> bool:
    """Return True if both specs have the same local tensors.

    A pass may then have removed a boxing between them."""
    return a.shape == b.shape and a.dtype == b.dtype and unmoved(a, b)  # type: ignore[attr-defined, arg-type]


def meetings(graph: fx.Graph, rank: int) -> dict[tuple[int, ...], str]:
    """Return, for each set of ranks that ``rank`` communicates with, a digest of their boxings.

    The digest covers the boxings and their order. It must be the same on all ranks of the set, or
    they would wait for each other."""
    boxing_lines: dict[tuple[int, ...], list[str]] = {}
    for node in graph.nodes:
        step = node.target
        if isinstance(step, BoxingCall):
            routes, how = [(step.src, step.dst)], "box"
        elif isinstance(step, GatherCall):
            routes, how = [node.meta["box"]], "gather"
        elif isinstance(step, (CoalescedCollective, StartCollective, WaitCollective)):
            routes, how = (
                [
                    r[:2]
                    for r in (step if isinstance(step, CoalescedCollective) else step.joint).routes
                ],
                type(step).__name__,
            )
        else:
            continue
        members = tuple(sorted({r for a, b in routes for s in (a, b) for r in s.placement.flat}))
        if rank in members:
            boxing_lines.setdefault(members, []).append(
                f"{how} {[(repr(a), repr(b)) for a, b in routes]}"
            )
    return {
        members: hashlib.sha256("\n".join(lines).encode()).hexdigest()
        for members, lines in boxing_lines.items()
    }


def same(everyone: Sequence[Mapping[tuple[int, ...], str]]) -> bool:
    """Return True if the results of `meetings` on all ranks match."""
    for digests in everyone:
        for members, digest in digests.items():
            if any(everyone[r].get(members) != digest for r in members):
                return False
    return True
