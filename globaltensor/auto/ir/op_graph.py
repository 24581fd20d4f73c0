"""A captured graph as the search sees it: calls of torch functions on values, whatever the
cluster."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..._base.pytree import replaced, tensors_in
from ..._tensor.global_tensor import GlobalTensor
from ...graph.capture.single_device import SAME

__all__ = ["Call", "Calls", "Value", "read"]


@dataclass
class Value:
    """A tensor: where it comes from, who takes it, and what of it is kept for backward."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether a gradient flows back to it
    maker: int  # number of the call that gives it; -1 for what the graph is given
    name: str
    path: str = ""  # of a parameter or buffer
    state: str = ""  # "parameter", "buffer", "input", or "" for what is computed
    takers: list[int] = field(
        default_factory=list
    )  # numbers of calls, in order, one for each operand
    saved: bool = False  # whether backward needs it
    plain: bool = False  # no global tensor: whole on every rank
    layout: Any = ()  # how something given lies, where that is said

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class Call:
    """One call. ``operands`` and ``outs`` are numbers of values; ``args`` and ``kwargs`` hold
    values' numbers boxed as `Ref`s where tensors stand."""

    number: int
    name: str
    func: Any
    args: Any
    kwargs: Any
    operands: tuple[int, ...]
    outs: tuple[int, ...]
    module: str
    where: str
    inplace: bool
    key: Hashable = None  # equal for calls that admit and cost the same
    extra: int = 0  # bytes that backward needs and that are none of the values
    keeps: tuple[int, ...] = ()  # the values that its backward needs
    fixed: Any = None  # the sbp that an explicit to_global asks for
    wild: bool = False  # whether it takes part in no search: it says nothing of layouts


class Ref(torch.Tensor):
    """Stands for a value among the arguments of a call."""

    number: int

    @classmethod
    def of(cls, number: int) -> Ref:
        made = torch.empty(0, device="meta").as_subclass(cls)
        made.number = number
        return made


@dataclass
class Calls:
    """The calls of one step, in order, and the values between them."""

    calls: list[Call]
    values: list[Value]
    outputs: tuple[int, ...] = ()
    training: bool = True
    #: name of the call in the captured graph -> number, for those with operands
    numbers: dict[str, int] = field(default_factory=dict)

    def states(self) -> Iterable[Value]:
        return (v for v in self.values if v.state)

    @property
    def parameters(self) -> list[Value]:
        return [v for v in self.values if v.state == "parameter"]


def read(
    graph: fx.Graph, constants: dict[str, Any], saved: dict[int, list[torch.Tensor]],
    paths: Mapping[str, str] | None = None,
    stands: Mapping[int, torch.Tensor] | None = None,
) -> Calls:  # fmt: skip
    """The calls of a logical graph. ``constants``: what its get_attr nodes name. ``saved``: what
    backward keeps of each of the user's calls, by its number, as `trace.saving` tells it.
    ``paths``: name of an input's placeholder -> path of the parameter that it is. ``stands``: id of
    a tensor with memory -> what stood for it while the graph was captured."""
    reader = _Reader(constants, saved, paths or {}, stands or {})
    for node in graph.nodes:
        reader.node(node)
    return reader.done()


class _Reader:
    def __init__(
        self,
        constants: dict[str, Any],
        saved: dict[int, list[torch.Tensor]],
        paths: Mapping[str, str],
        stands: Mapping[int, torch.Tensor],
    ) -> None:
        self.constants, self.saved, self.paths, self.stands = constants, saved, paths, stands
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.at: dict[tuple[fx.Node, int], int] = {}
        self.storages: dict[
            int, int
        ] = {}  # storage of a local stand-in -> the value whose memory it is
        self.storage_of: list[int] = []  # of each value
        self.numbers: dict[str, int] = {}
        self.outputs: tuple[int, ...] = ()
        self.backward = False

    def value(
        self, node: fx.Node, k: int, t: torch.Tensor, maker: int, state: str = "", path: str = ""
    ) -> int:
        number = len(self.values)
        self.values.append(
            Value(number, tuple(t.shape), t.dtype, t.requires_grad, maker, node.name, path, state)
        )
        self.values[-1].plain = not isinstance(t, GlobalTensor) and not state
        self.at[node, k] = number
        local = t._local if isinstance(t, GlobalTensor) else t
        self.storage_of.append(_storage(self.stands.get(id(local), local)))
        self.storages.setdefault(self.storage_of[-1], number)
        return number

    def of(self, node: fx.Node) -> int | None:
        """The value that a node is."""
        found = self.at.get((node, 0))
        if found is not None:
            return found
        base, val = node, node.meta.get("val")
        while (
            base.target in _PARTS
            and isinstance(base.args[0], fx.Node)
            and not isinstance(base.args[0].meta.get("val"), torch.Tensor)
        ):
            base = base.args[0]
        for k, t in enumerate(tensors_in(base.meta.get("val"), [])):
            if t is val and (base, k) in self.at:
                return self.at[base, k]
        return None

    def node(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op in ("call_function", "call_method") and "func" in node.meta:
            self._call(node)
        elif node.op == "output":
            found: list[fx.Node] = []
            fx.node.map_arg(node.args, found.append)
            self.outputs = tuple(v for n in found if (v := self.of(n)) is not None)

    def _placeholder(self, node: fx.Node) -> None:
        t = node.meta["val"]
        path = self.paths.get(node.name) or node.meta.get("path", "")
        kind = "input" if not path else "parameter" if t.requires_grad else "buffer"
        value = self.values[self.value(node, 0, t, -1, kind, path)]
        if isinstance(t, GlobalTensor) and t._spec.placement.size > 1:
            value.layout = t._spec.shown.layout
        elif not isinstance(t, GlobalTensor):
            value.plain = True

    def _call(self, node: fx.Node) -> None:
        number, operands = len(self.calls), []

        def taken(n: fx.Node) -> Any:
            if n.op == "get_attr":
                return self.constants.get(str(n.target), n)
            v = self.of(n)
            if v is None:
                return n
            operands.append(v)
            return Ref.of(v)

        name = getattr(node.meta["func"], "__name__", "")
        given = (
            (node.args[:1], {}) if name == "__get__" else (node.args, node.kwargs)
        )  # its name is written beside
        args, kwargs = fx.node.map_arg(given, taken)
        outs = tensors_in(node.meta["val"], [])
        writes = (
            (name.endswith("_") and not name.endswith("__"))
            or name in _WRITERS
            or kwargs.get("inplace") is True
        )
        inplace = bool(outs) and bool(operands) and writes
        self.backward = self.backward or name == "backward"
        made = tuple(self.value(node, k, t, number) for k, t in enumerate(outs))
        call = Call(
            number,
            node.name,
            node.meta["func"],
            args,
            kwargs,
            tuple(operands),
            made,
            node.meta.get("module", ""),
            node.meta.get("where", ""),
            inplace,
        )
        call.wild = name in _WILD or not made
        if getattr(node.meta["func"], "__name__", "") in SAME and operands:
            call.fixed = _asked(node)
        for v in operands:
            self.values[v].takers.append(number)
        self._keeps(call, node)
        call.key = None if call.wild else _key(call, self.values)
        self.calls.append(call)
        self.numbers[node.name] = number

    def _keeps(self, call: Call, node: fx.Node) -> None:
        """What backward keeps of a call. Of a parameter that was brought here from another layout
        it is told by its size; what is none of the values counts as much on each rank as results
        do."""
        seen: set[int] = set()
        outs = [t for t in tensors_in(node.meta["val"], []) if isinstance(t, GlobalTensor)]
        here, all_ = sum(t._local.numel() for t in outs), sum(t.numel() for t in outs)
        for t in self.saved.get(node.meta.get("call", -1), ()):
            where = _storage(t)
            if where in seen:
                continue
            seen.add(where)
            v = self.storages.get(where)
            if v is None:
                leaves = (
                    o
                    for o in call.operands
                    if self.values[o].state == "parameter" and self.values[o].layout
                )
                v = next(
                    (
                        o
                        for o in leaves
                        if torch.Size(self.values[o].shape).numel() == t.numel()
                        and self.values[o].dtype is t.dtype
                    ),
                    None,
                )
            if v is not None:
                self.values[v].saved = True
                call.keeps += (
                    next(
                        (o for o in (*call.operands, *call.outs) if self.storage_of[o] == where), v
                    ),
                )
            else:
                call.extra += t.nbytes * all_ // here if here else t.nbytes

    def done(self) -> Calls:
        return Calls(self.calls, self.values, self.outputs, True, self.numbers)


_PARTS = frozenset({operator.getitem})
_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_WILD = frozenset({"backward", "__set__"})


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _asked(node: fx.Node) -> Any:
    """The entries that an explicit to_global asks for, as the result shows them; None where it
    names none."""
    out = node.meta["val"]
    named = node.kwargs.get("sbp", node.args[2] if len(node.args) > 2 else None)
    return tuple(out._spec.layout) if isinstance(out, GlobalTensor) and named is not None else None


def _key(call: Call, values: list[Value]) -> Hashable:
    """What a call's signatures and costs depend on."""
    shapes = tuple(
        (values[v].shape, values[v].dtype, values[v].grad, bool(values[v].state), values[v].plain)
        for v in call.operands
    )
    alike = tuple(
        map(call.operands.index, call.operands)
    )  # an operand that stands twice comes in one layout
    numbers: Callable[[], int] = itertools.count().__next__
    flat = repr(replaced((call.args, call.kwargs), iter([_Mark(numbers()) for _ in call.operands])))
    # Functions and modules among the arguments differ from layer to layer by where they are, which
    # costs nothing.
    return (call.func, shapes, alike, _ADDRESS.sub("", flat), call.inplace, call.extra, call.fixed)


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class _Mark:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
