"""The captured graph in the form the search uses: calls of torch functions on values.

It is independent of the cluster. `trace.py` calls `read`, and `intra_op` and `inter_op` work on
`Calls`.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from ..._base.pytree import replaced, tensors_in
from ..._tensor.global_tensor import GlobalTensor
from ...graph.capture.single_device import SAME

__all__ = ["NOTHING_TO_SEARCH", "Call", "Calls", "Value", "read"]

NOTHING_TO_SEARCH: Final = (
    "nothing to search: the model runs no operation on tensors, so no layout costs anything. Give "
    "flow.auto.plan the module whose forward computes, with the arguments of that forward"
)


@dataclass
class Value:
    """A tensor: its maker, the calls that use it, and whether backward needs it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # True if a gradient flows back to it
    maker: int  # number of the call that returns it; -1 for inputs of the graph
    name: str
    path: str = ""  # path of a parameter or buffer
    state: str = ""  # "parameter", "buffer", "input", or "" for a computed value
    # Numbers of the calls that use it, in order, one for each operand.
    takers: list[int] = field(default_factory=list)
    saved: bool = False  # True if backward needs it
    plain: bool = False  # True if it is no global tensor: every rank has all of it
    layout: Any = ()  # the layout of a given tensor, where one is set

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def label(self) -> str:
        """The path if it has one, else the name.

        Parameters have a path. The name of a computed value is that of the call that makes it.
        """
        return self.path or self.name


@dataclass
class Call:
    """One call of a torch function.

    ``operands`` and ``outs`` are numbers of values. ``args`` and ``kwargs`` have a `ValueRef` with
    the number of the value in place of each tensor.
    """

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
    key: Hashable = None  # equal for calls with the same signatures and costs
    extra: int = 0  # bytes that backward needs in tensors that are none of the values
    keeps: tuple[int, ...] = ()  # the values that its backward needs
    fixed: Any = None  # the sbp that an explicit to_global asks for
    wild: bool = False  # True if it is not searched, because it implies nothing for layouts


class ValueRef(torch.Tensor):
    """A placeholder for a value among the arguments of a call."""

    number: int

    @classmethod
    def of(cls, number: int) -> ValueRef:
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
    #: Name of the call in the captured graph -> number, for calls with operands.
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
    """Return the calls of a logical graph.

    - ``constants``: the objects that its get_attr nodes name.
    - ``saved``: number of the user's call -> tensors that backward saves, from `trace.saving`.
    - ``paths``: name of an input's placeholder -> path of the parameter that it represents.
    - ``stands``: id of a tensor with memory -> the fake tensor used during capture.
    """
    reader = _CallReader(constants, saved, paths or {}, stands or {})
    for node in graph.nodes:
        reader.node(node)
    return reader.done()


class _CallReader:
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
        # Storage of a local fake tensor -> the value whose memory it is.
        self.storages: dict[int, int] = {}
        self.storage_of: list[int] = []  # by number of the value
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
        local = t._stored if isinstance(t, GlobalTensor) else t
        self.storage_of.append(_storage(self.stands.get(id(local), local)))
        self.storages.setdefault(self.storage_of[-1], number)
        return number

    def of(self, node: fx.Node) -> int | None:
        """Return the number of the value that a node represents, or None."""
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

        def to_value_ref(n: fx.Node) -> Any:
            if n.op == "get_attr":
                return self.constants.get(str(n.target), n)
            v = self.of(n)
            if v is None:
                return n
            operands.append(v)
            return ValueRef.of(v)

        name = getattr(node.meta["func"], "__name__", "")
        # A property's name is stored separately.
        given = (node.args[:1], {}) if name == "__get__" else (node.args, node.kwargs)
        args, kwargs = fx.node.map_arg(given, to_value_ref)
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
            call.fixed = _explicit_layout(node)
        for v in operands:
            self.values[v].takers.append(number)
        self._record_saved_tensors(call, node)
        call.key = None if call.wild else _key(call, self.values)
        self.calls.append(call)
        self.numbers[node.name] = number

    def _record_saved_tensors(self, call: Call, node: fx.Node) -> None:
        """Record the tensors that backward saves of a call.

        A parameter that was boxed to the call from another layout is recognised by its size.
        Tensors that are none of the values are scaled by the ratio of global to local size of the
        call's results.
        """
        seen: set[int] = set()
        outs = [t for t in tensors_in(node.meta["val"], []) if isinstance(t, GlobalTensor)]
        local_numel, global_numel = (
            sum(t._stored.numel() for t in outs),
            sum(t.numel() for t in outs),
        )
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
                call.extra += t.nbytes * global_numel // local_numel if local_numel else t.nbytes

    def done(self) -> Calls:
        return Calls(self.calls, self.values, self.outputs, True, self.numbers)


_PARTS = frozenset({operator.getitem})
_WRITERS = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_WILD = frozenset({"backward", "__set__"})


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _explicit_layout(node: fx.Node) -> Any:
    """Return the layout that an explicit to_global sets, as its result has it.

    The result is None where the call names no sbp.
    """
    out = node.meta["val"]
    named = node.kwargs.get("sbp", node.args[2] if len(node.args) > 2 else None)
    return tuple(out._spec.layout) if isinstance(out, GlobalTensor) and named is not None else None


def _key(call: Call, values: list[Value]) -> Hashable:
    """Return a key of everything that a call's signatures and costs depend on."""
    shapes = tuple(
        (values[v].shape, values[v].dtype, values[v].grad, bool(values[v].state), values[v].plain)
        for v in call.operands
    )
    # An operand that appears twice has one layout.
    alike = tuple(map(call.operands.index, call.operands))
    numbers: Callable[[], int] = itertools.count().__next__
    flat = repr(
        replaced((call.args, call.kwargs), iter([_OperandMark(numbers()) for _ in call.operands]))
    )
    # Functions and modules among the arguments differ between layers by their addresses only, which
    # does not affect costs.
    return (call.func, shapes, alike, _ADDRESS.sub("", flat), call.inplace, call.extra, call.fixed)


_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class _OperandMark:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"
