"""Box sums once: ``all_reduce(a) + all_reduce(b)`` becomes ``all_reduce(a + b)``.

Boxing is linear, so this holds for operands that are boxed alike. Linear functions of one tensor
may be between a boxing and the sum. These are negation, multiplication or division by a number, a
cast to a wider type, and a change of shape where no dim is split. They are then computed before the
boxing. `pass_manager` runs this pass.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...cluster import current_cluster
from ...sharding.spec import Spec
from ..program.nodes import BoxingCall
from .alias_analysis import AliasSets, costs, differentiable, is_boxing, modes, plain

__all__ = ["fold_all_reduces"]

_SUMS = (operator.add, torch.add, "add", operator.sub, torch.sub, "sub", "subtract")
_NEGATIONS = (operator.neg, torch.neg, "neg", "negative")
_FACTORS = (operator.mul, torch.mul, "mul", operator.truediv, torch.div, "div", "true_divide")
_OFFSETS = (operator.add, torch.add, "add", operator.sub, torch.sub, "sub")
_CASTS = ("to", "float", "double", "type_as")
_SHAPES = (
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze",
    "contiguous", "clone", "t", torch.reshape, torch.flatten,
    torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze, torch.clone,
)  # fmt: skip

Chain = tuple[fx.Node, list[fx.Node]]  # a boxing, and the linear functions after it, in order


def fold_all_reduces(graph: fx.Graph) -> None:
    """Fold each sum of two operands, in order, so that a sum of many operands folds too."""
    memory, mode = AliasSets(graph), modes(graph)
    for node in list(graph.nodes):
        if (
            node.op not in ("call_function", "call_method")
            or node.target not in _SUMS
            or set(node.kwargs) - {"alpha"}
            or len(node.args) != 2
        ):
            continue
        x, y = node.args
        if (
            not isinstance(x, fx.Node)
            or not isinstance(y, fx.Node)
            or x is y
            or not memory.fixed(node)
        ):
            continue
        chains = _chain(x, memory), _chain(y, memory)
        if chains[0] is None or chains[1] is None:
            continue
        if all(
            mode.get(n, mode[node]) == mode[node]
            for box, path in chains
            if box
            for n in (box, *path)
        ):  # type: ignore[misc]
            _fold(graph, node, *chains)  # type: ignore[arg-type]


def _chain(node: fx.Node, memory: AliasSets) -> Chain | None:
    """Return the boxing in which ``node`` is linear and the steps after it, or None.

    Each step must have no other user."""
    path: list[fx.Node] = []
    while True:
        if len(node.users) != 1 or not memory.fixed(node):
            return None
        if is_boxing(node):
            known = plain(node.target.src, node.target.dst) and node.target.grad is None
            whole = not any(e.is_split for e in (*node.target.src.layout, *node.target.dst.layout))
            good = (
                known
                and node.target.src.placement is node.target.dst.placement
                and (whole or all(_pointwise(n) for n in path))
            )
            return (node, path[::-1]) if good and memory.fixed(node.args[0]) else None
        if node.meta.get("effect") or not (_pointwise(node) or _is_reshape_or_cast(node)):
            return None
        path.append(node)
        node = node.args[0]


def _tensors_of(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a call's result and its first operand, as recorded; None where one is no tensor."""
    if (
        node.op not in ("call_function", "call_method")
        or not node.args
        or not isinstance(node.args[0], fx.Node)
    ):
        return None
    val, operand = node.meta.get("val"), node.args[0].meta.get("val")
    if isinstance(val, torch.Tensor) and isinstance(operand, torch.Tensor):
        return val, operand
    return None


def _pointwise(node: fx.Node) -> bool:
    """Return True for negation, and multiplication or division by a number, of one dtype."""
    tensors = _tensors_of(node)
    if tensors is None or tensors[0].dtype is not tensors[1].dtype or node.kwargs:
        return False
    if node.target in _NEGATIONS:
        return len(node.args) == 1
    number = len(node.args) == 2 and isinstance(node.args[1], (int, float))
    return number and (node.target in _FACTORS or (node.target in _OFFSETS and node.args[1] == 0))


def _is_reshape_or_cast(node: fx.Node) -> bool:
    """Return True for a change of shape, or a cast to a type that holds at least as much.

    Such a step is linear if every local tensor has the global shape."""
    tensors = _tensors_of(node)
    if tensors is None or any(isinstance(a, fx.Node) for a in node.args[1:]):
        return False
    val, operand = tensors
    if node.target in _SHAPES:
        return val.dtype is operand.dtype and val.numel() == operand.numel()
    wider = (
        operand.is_floating_point()
        and val.is_floating_point()
        and torch.promote_types(val.dtype, operand.dtype) is val.dtype
    )
    return (
        node.target in _CASTS
        and wider
        and val.device == operand.device
        and val.shape == operand.shape
    )


def _spec_after(spec: Spec, box: fx.Node, path: list[fx.Node]) -> Spec:
    """Return the spec after the steps of ``path`` for a tensor with ``spec`` before them."""
    if not path:
        return spec
    val = path[-1].meta["val"]
    if val.shape == box.meta["val"].shape:
        return spec.replace(dtype=val.dtype)
    return spec.replace(shape=val.shape, dtype=val.dtype)


def _fold(graph: fx.Graph, node: fx.Node, first: Chain, second: Chain) -> None:
    (a, path_a), (b, path_b) = first, second
    src, dst = _spec_after(a.target.src, a, path_a), _spec_after(a.target.dst, a, path_a)
    if (
        src is not _spec_after(b.target.src, b, path_b)
        or dst is not _spec_after(b.target.dst, b, path_b)
        or node.meta["val"].dtype is not dst.dtype
    ):
        return
    both = differentiable(node)
    cluster, size = current_cluster(), src.dtype.itemsize
    more = sum(
        cluster.seconds("copy", size * (src.local_numel() - dst.local_numel()), 1) * (1 + len(p))
        for p in (path_a, path_b)
    )
    now = costs([(a.target.src, a.target.dst), (b.target.src, b.target.dst)], both)
    if (
        not now
        or costs([(src, dst)], both)
        + max(0.0, more if src.local_numel() > dst.local_numel() else 0.0)
        >= now
    ):
        return
    with graph.inserting_before(node):
        x, y = (_apply_without_boxing(graph, box, path) for box, path in (first, second))
        whole = dst.local_numel() == src.local_numel()
        total = graph.create_node(node.op, node.target, (x, y), node.kwargs)
        total.meta.update(node.meta, val=node.meta["val"] if whole else x.meta["val"])
        boxed = graph.call_function(
            BoxingCall(src, dst, None, a.target.why, a.target.alias and b.target.alias), (total,)
        )
        boxed.meta.update(node.meta, box=(src, dst), calls=1)
    node.replace_all_uses_with(boxed)
    for gone in (node, *reversed(path_a), *reversed(path_b), a, b):
        graph.erase_node(gone)


def _apply_without_boxing(graph: fx.Graph, box: fx.Node, path: list[fx.Node]) -> fx.Node:
    """Apply the steps of ``path`` to the operand of the boxing, and return the last node."""
    at: Any = box.args[0]
    same = box.args[0].meta["val"].shape == box.meta["val"].shape
    for node in path:
        # The boxed tensor is contiguous; the operand may not be.
        new = graph.create_node(
            node.op,
            "reshape" if node.target == "view" else node.target,
            (at, *node.args[1:]),
            dict(node.kwargs),
        )
        new.meta.update(node.meta, val=node.meta["val"] if same else at.meta["val"])
        at = new
    return at  # type: ignore[no-any-return]
