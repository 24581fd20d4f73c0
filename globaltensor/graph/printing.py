"""Texts of a graph: its modules and ops, the lines that ranks compare, its log.

`Graph` and `rank_agreement` call this module."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import GraphError

__all__ = ["Debug", "describe", "lines"]

log = logging.getLogger(__name__)


def lines(graph: fx.Graph) -> list[str]:
    """Return one line for each op: its arguments, and its results with their placements.

    The text must be the same on every rank: otherwise the ranks run different graphs. It leaves out
    the sizes of local tensors (`to_local`) and the numbers that a rank computes from them alone,
    which may differ."""
    own = _rank_local_nodes(graph)
    return [_line(node, node in own) for node in graph.nodes]


def _rank_local_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose plain tensors are this rank's own.

    They follow from a rank's local tensor, or serve only such nodes."""
    own_nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_plain(node) and (
            node.target == "to_local" or any(a in own_nodes for a in node.all_input_nodes)
        ):
            own_nodes.add(node)
    for node in reversed(graph.nodes):
        if (
            _is_plain(node)
            and node.op != "placeholder"
            and node.users
            and all(user in own_nodes for user in node.users)
        ):
            own_nodes.add(node)
    return own_nodes


def _is_plain(node: fx.Node) -> bool:
    outs = tensors_in(node.meta.get("val"), [])
    return bool(outs) and not any(isinstance(t, GlobalTensor) for t in outs)


def _line(node: fx.Node, own: bool = False) -> str:
    target = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", repr(node.target))
    )
    arguments = ", ".join(
        [_text(a, own) for a in node.args]
        + [f"{k}={_text(v, own)}" for k, v in node.kwargs.items()]
    )
    outs = " ".join(_kind(t, own) for t in tensors_in(node.meta.get("val"), []))
    return f"{node.name} = {target}({arguments})" + (f"  # {outs}" if outs else "")


def _text(a: Any, own: bool) -> str:
    if isinstance(a, fx.Node):
        return a.name
    if isinstance(a, (tuple, list)):
        return f"[{', '.join(_text(v, own) for v in a)}]"
    if isinstance(a, dict):
        return f"{{{', '.join(f'{k}: {_text(v, own)}' for k, v in a.items())}}}"
    if own and (isinstance(a, (int, float, slice)) and not isinstance(a, bool)):
        return "of this rank"
    text = repr(a)
    return text if " at 0x" not in text else type(a).__name__


def _kind(t: torch.Tensor, own: bool = False) -> str:
    if isinstance(t, GlobalTensor):
        return f"{t._spec!r} @ {t._spec.placement!r}"
    return f"{str(t.dtype).removeprefix('torch.')}{['of this rank'] * t.dim() if own else list(t.shape)}"  # noqa: E501


def describe(graph: Any) -> str:
    """Return the modules with their parameters, and each module's ops with sbp and placement."""
    out = [f"(GRAPH:{graph.name}:{type(graph).__name__}): ("]
    ops: defaultdict[str, list[str]] = defaultdict(list)
    if graph._last is not None:
        for node in graph._last.captured.logical.nodes:
            if node.op in ("call_function", "call_method") and node.meta.get("calls"):
                ops[node.meta["module"]].append(_line(node) + graph._debug.where(node))
        out.extend(
            f"  (INPUT:{_line(n).split('  # ')[0].split(' = ')[0]}: "
            f"{' '.join(_kind(t) for t in tensors_in(n.meta['val'], []))})"
            for n in _input_nodes(graph)
        )
    for name, module in graph._modules.items():
        for path, part in module.named_modules():
            full = f"{name}.{path}".rstrip(".")
            pad = "  " * (full.count(".") + 1)
            out.append(f"{pad}(MODULE:{full}:{type(part).__name__})")
            for kind, items in (
                ("PARAMETER", part.named_parameters(recurse=False)),
                ("BUFFER", part.named_buffers(recurse=False)),
            ):
                out.extend(f"{pad}  ({kind}:{full}.{own}: {_kind(t)})" for own, t in items)
            out.extend(f"{pad}  (OPERATOR: {text})" for text in ops.pop(full, ()))
    for rest in ops.values():
        out.extend(f"  (OPERATOR: {text})" for text in rest)
    if graph._last is None:
        out.append("  (not captured yet: ops are known after the first call)")
    return "\n".join([*out, ")"])


def _input_nodes(graph: Any) -> list[fx.Node]:
    return [
        n
        for n in graph._last.captured.logical.nodes
        if n.op == "placeholder" and n.name.startswith("input_")
    ]


class Debug:
    """The level of a graph's log, and the ranks that write it."""

    def __init__(
        self, level: int, ranks: Any, depth: int, only_user: bool, with_stack: bool
    ) -> None:
        if not isinstance(level, int) or not -1 <= level <= 3:
            raise GraphError(f"debug: v_level is -1 (nothing), 0, 1, 2 or 3 (all), got {level!r}")
        if not isinstance(ranks, (int, type(None))) and not (
            isinstance(ranks, (list, tuple, range)) and all(isinstance(r, int) for r in ranks)
        ):
            raise GraphError(
                f"debug: ranks is a rank, a list of them, -1 for all or None for rank 0, got "
                f"{ranks!r}"
            )
        self.level, self.depth, self.only_user, self.with_stack = (
            level,
            depth,
            only_user,
            with_stack,
        )
        self.ranks = ranks

    def where(self, node: fx.Node) -> str:
        """Return the line of code that made an op, or "" if the log does not show such lines."""
        return f"   ({node.meta['where']})" if self.with_stack and node.meta.get("where") else ""

    def wanted(self) -> bool:
        if self.level < 0:
            return False
        own_rank = world().rank
        return (
            own_rank == 0
            if self.ranks is None
            else any(
                r in (-1, own_rank)
                for r in ([self.ranks] if isinstance(self.ranks, int) else self.ranks)
            )
        )

    def log(self, graph: Any, captured: Any, module: Any) -> None:
        """Log a graph that has just been built."""
        if not self.wanted():
            return
        prefix = f"[rank {world().rank}] {graph.name}"
        calls = sum(bool(n.meta.get("calls")) for n in captured.logical.nodes)
        nodes = sum(len(m.graph.nodes) for m in module.modules() if isinstance(m, fx.GraphModule))
        log.warning(
            "%s captured: %d ops, %d states, %d nodes in this rank's program",
            prefix,
            calls,
            len(captured.states),
            nodes,
        )
        if self.level >= 1:
            log.warning("%s\n%s", prefix, describe(graph))
        if self.level >= 2:
            for node in captured.logical.nodes:
                log.warning("%s %s%s", prefix, _line(node), self.where(node))
        if self.level >= 3:
            log.warning("%s program:\n%s", prefix, module.code)
