"""The registry of rules: torch function -> rule.

One declaration serves every spelling (function, method, operator, in-place). Dispatch, graphs and
the search look rules up here.

Many caches hold results that follow from rules: plans in each thread, programs in each graph,
candidates of the search. A rule may be declared at any time, by any thread. Each such cache is
therefore a `Derived`, or compares ``RULES.version``.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._base.python_numbers import is_number
from ..._base.torch_private import all_overloads, spellings_of_operator
from .notation import Arg, OpDescription, align, parse

__all__ = [
    "DATA_FREE_VARIANTS",
    "RULES",
    "Derived",
    "Rule",
    "Rules",
    "composite",
    "flatten_args",
    "pointwise",
    "rule",
    "rule_of",
    "spellings_of",
]

#: Namespaces in which a name is looked up. The first four also hold in-place and dunder spellings.
SPACES = (
    torch.Tensor,
    torch,
    torch.nn.functional,
    torch.special,
    torch.linalg,
    torch.fft,
    torch.functional,
)
DUNDERS = {
    "add": ("add", "radd"), "sub": ("sub",), "mul": ("mul", "rmul"), "div": ("truediv", "div"),
    "pow": ("pow",), "matmul": ("matmul",),
    "eq": ("eq",), "ne": ("ne",), "lt": ("lt",), "le": ("le",), "gt": ("gt",), "ge": ("ge",),
    "neg": ("neg",), "abs": ("abs",),
    "bitwise_not": ("invert",), "bitwise_and": ("and", "rand"), "bitwise_or": ("or", "ror"),
    "bitwise_xor": ("xor", "rxor"),
    "remainder": ("mod",), "floor_divide": ("floordiv",), "bitwise_left_shift": ("lshift",),
    "bitwise_right_shift": ("rshift",),
    "rsub": ("rsub",), "rdiv": ("rtruediv", "rdiv"), "rpow": ("rpow",), "rfloordiv": ("rfloordiv",),
    "rmod": ("rmod",),
    "rmatmul": ("rmatmul",), "rlshift": ("rlshift",), "rrshift": ("rrshift",),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """The signatures that a torch function admits.

    ``describe(op, *args, **kwargs)`` fills an `OpDescription`. Tensors among the arguments are
    `Arg` objects.
    """

    name: str
    describe: Callable[..., None]
    scalars: bool = False  # the plan never depends on the values of number arguments
    inplace: bool = False


_changing = threading.Lock()  # guards the rules and the caches derived from them
_DERIVED: weakref.WeakSet[Derived] = weakref.WeakSet()


class Rules(dict[Any, Rule]):
    """The mapping from a torch function object to its rule."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0  # counts declarations
        self.scalars: set[Any] = set()  # functions whose rules set ``scalars``

    def __setitem__(self, function: Any, rule: Rule) -> None:
        with _changing:
            super().__setitem__(function, rule)
            (self.scalars.add if rule.scalars else self.scalars.discard)(function)
            self._clear_derived()

    def __delitem__(self, function: Any) -> None:
        with _changing:
            super().__delitem__(function)
            self.scalars.discard(function)
            self._clear_derived()

    def _clear_derived(self) -> None:
        self.version += 1
        for derived in list(_DERIVED):
            derived.entries.clear()


class Derived:
    """A cache of results that follow from rules.

    Declaring a rule, in any thread, empties the cache.
    """

    __slots__ = ("__weakref__", "entries")

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        with _changing:
            _DERIVED.add(self)

    def keep(self, key: Any, value: Any, version: int, most: int) -> None:
        """Save ``value`` if the rules are still those of ``version``.

        At ``most`` entries, the cache is emptied first.
        """
        with _changing:
            if version == RULES.version:
                if len(self.entries) >= most:
                    self.entries.clear()
                self.entries[key] = value


RULES = Rules()

#: Functions that read values before they compute -> variants that read none. The variants also
#: accept plain tensors. A graph needs them because values are unknown during capture.
DATA_FREE_VARIANTS: dict[Any, Callable[..., Any]] = {}


def rule_of(func: Any, kwargs: Mapping[str, Any]) -> Rule | None:
    """Return the rule of a call, or None where the function has none.

    With ``inplace=True`` among the arguments (``F.relu`` and its like), return the rule of an
    in-place op.
    """
    rule = RULES.get(func)
    return (
        dataclasses.replace(rule, inplace=True)
        if rule is not None and kwargs.get("inplace") is True
        else rule
    )


def torch_functions_named(name: str) -> list[tuple[Any, bool]]:
    """Return every torch function that ``name`` stands for.

    Each comes with a flag that is True if the function writes into its first operand.
    """
    functions: list[tuple[Any, bool]] = []
    for space in SPACES:
        for n, inplace in ((name, False), (name + "_", True)):
            f = getattr(space, n, None)
            if callable(f):
                functions.append((f, inplace))
    for d in DUNDERS.get(name, ()):
        functions += [
            (f, i)
            for n, i in ((f"__{d}__", False), (f"__i{d}__", True))
            if callable(f := getattr(torch.Tensor, n, None))
        ]
    return functions


def spellings_of(target: str | Callable[..., Any]) -> list[tuple[Any, bool]]:
    """Return every function that a rule's target stands for.

    Each comes with a flag that is True if the function writes into its first operand.
    """
    operators = spellings_of_operator(target)
    if operators:
        return [(operator, False) for operator in operators]
    return torch_functions_named(target) if isinstance(target, str) else [(target, False)]


def rule(
    target: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
    notation: str | None = None,
    *,
    linear: Sequence[Sequence[int]] = (),
    addends: Sequence[int] = (),
    scalars: bool = False,
) -> Any:
    """Declare which signatures a function admits.

    Give index notation in one line, or use it as a decorator of a function that fills an
    ``OpDescription``. ``target``: a torch function, a name (all its spellings), an operator made
    with torch.library, or a sequence of these. ``notation``: see ``notation.parse``. ``linear`` and
    ``addends`` are positions of tensor operands, see ``notation.OpDescription``. ``scalars``: the
    plan never depends on the values of number arguments. Return the function that fills the
    ``OpDescription``, or without ``notation`` the decorator.

    A rule takes effect immediately, in all threads. Graphs are captured again at their next call,
    so every rank must declare the same rules between the same calls.

    >>> import torch
    >>> _ = rule(torch.chain_matmul, "m k, k n -> m n", linear=[[0], [1]])
    """
    if notation is not None:
        text = notation

        def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
            operands = [
                o
                for a in (*args, *kwargs.values())
                for o in (flatten_args(a) if a is not None else [None])
            ]
            while operands and operands[-1] is None:
                operands.pop()
            op.dims, op.out, op.whole = parse(text, operands)
            op.linear = [frozenset(g) for g in linear if max(g) < len(op.args)]
            op.addends = frozenset(i for i in addends if i < len(op.args))
            names = {f for dims in op.dims for f in dims if f is not None}
            op.reduce = dict.fromkeys(
                names - {f for dims in op.out for f in dims} - op.whole, "sum"
            )

        return rule(target, scalars=scalars)(describe)

    def declare(describe: Callable[..., None]) -> Callable[..., None]:
        for t in [target] if isinstance(target, str) or callable(target) else target:
            for f, inplace in spellings_of(t):
                RULES[f] = Rule(
                    t if isinstance(t, str) else getattr(f, "__name__", str(t)),
                    describe,
                    scalars,
                    inplace,
                )
        return describe

    return declare


def flatten_args(value: Any) -> list[Arg]:
    """Return the operands in a pytree of tuples, lists and dicts, in order."""
    if isinstance(value, Arg):
        return [value]
    if isinstance(value, (tuple, list)):
        return [a for v in value for a in flatten_args(v)]
    if isinstance(value, dict):
        return [a for v in value.values() for a in flatten_args(v)]
    return []


def pointwise(names: str, *, linear: str = "", carries: bool = False, outs: int = 1) -> None:
    """Declare functions that work element by element and broadcast their operands.

    ``linear`` is one of:

      ""       not linear
      "each"   linear in each operand separately (a product)
      "first"  linear in the first operand only (a quotient)
      "joint"  linear in all tensor operands together, if no plain number is added (a sum)
      "two"    linear in the first two operands together (a point between them)
    """

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        factors = [k for k in ("alpha", "value") if isinstance(kwargs.get(k), Arg)]
        if factors:
            op.composite = _with_factors(op.function, factors)
            return
        every, result = align([a.shape for a in op.args])
        op.dims, op.out, op.carries = every, [result] * outs, carries
        n = len(op.args)
        numbers = _number_operands(args, kwargs)
        if linear == "each":
            op.linear = [frozenset([i]) for i in range(n)]
        elif linear == "first" and args and isinstance(args[0], Arg):
            op.linear = [frozenset([0])]
        elif linear == "joint":
            if any(map(is_number, numbers)) and any(
                e.is_partial for a in op.args for e in a.spec.layout
            ):
                op.compose(numbers_as_tensors(op.function))
            op.linear = [] if numbers else [frozenset(range(n))]
        elif linear == "two" and n > 1 and all(isinstance(a, Arg) for a in args[:2]):
            op.linear = [frozenset((0, 1))]

    rule(names.split(), scalars=True)(describe)


def _number_operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the operands of a call that are not tensors, such as numbers, by position or name.

    The second of three arguments is a factor, in torch's old spelling ``add(x, alpha, y)``.
    """
    operands = args[::2] if len(args) == 3 and isinstance(args[2], Arg) else args
    named = [kwargs[name] for name in ("input", "self", "other") if name in kwargs]
    return [a for a in (*operands, *named) if not isinstance(a, Arg)]


def _with_factors(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return ``function`` with the tensors in keywords ``names`` replaced by their values.

    torch requires numbers for these keywords, as in ``x.add_(y, alpha=t)``.
    """
    return lambda *args, **kwargs: function(
        *args, **{k: v.item() if k in names else v for k, v in kwargs.items()}
    )


def numbers_as_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its plain number arguments made into 0-dim global tensors.

    A number added to a partial sum must be added only once. The overload ``aten.add.Scalar``
    accepts no tensor, so the operator itself is called. Its third argument is the factor.
    """
    operator = all_overloads(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        x = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))

        def tensor(a: Any) -> Any:
            if not is_number(a):
                return a
            if isinstance(a, bool):  # torch subtracts no bool, and says so
                return x.new_full((), a, dtype=torch.bool)
            return x.new_full((), a, dtype=torch.result_type(torch.empty((), dtype=x.dtype), a))

        named = kwargs if len(args) < 3 else {**kwargs, "alpha": args[2]}
        return operator(
            *[tensor(a) for a in args[:2]],
            **{k: a if k == "alpha" else tensor(a) for k, a in named.items()},
        )

    return call


def composite(names: str, when: Callable[..., bool]) -> Any:
    """Decorate a function of global tensors that replaces a call where ``when`` returns True.

    ``when(*args, **kwargs)`` gets the arguments of the call. Where it returns False, the rule
    declared before applies.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            for f, inplace in torch_functions_named(name):
                if inplace or f not in RULES:
                    continue
                before = RULES[f]

                def describe(
                    op: OpDescription, *args: Any, before: Rule = before, **kwargs: Any
                ) -> None:
                    if when(*args, **kwargs):
                        op.compose(function)
                    else:
                        before.describe(op, *args, **kwargs)

                RULES[f] = Rule(before.name, describe, before.scalars)
        return function

    return declare
