"""Tests of indices and classes out of range. The error is that of one device, in global sizes, and
the same on all ranks that know the index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split
X, COLUMNS, ROWS = torch.arange(24.0).view(6, 4), torch.ones(6, 5), torch.ones(5, 4)
NARROW = X[:, :2].clone()


def indices(*shape: int, n: int, at: int, wrong: int) -> Tensor:
    """Return indices into a dim of ``n`` elements; the one at position ``at`` is out of range."""
    found = torch.arange(math.prod(shape)).view(shape) % n
    found.view(-1)[at] = wrong
    return found


def written(x: Tensor, key: Any) -> Tensor:
    x = x.clone()
    x[key] = 1.0
    return x


Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def cases(at: int, wrong: int) -> Iterator[Case]:
    """Yield (name, function, operands). ``at`` is the position of the wrong index, so that one rank
    alone would see it."""
    rows, columns = indices(2, 4, n=6, at=at, wrong=wrong), indices(6, 2, n=4, at=at, wrong=wrong)
    few, flat = indices(5, n=4, at=at, wrong=wrong), indices(5, n=24, at=at, wrong=wrong * 10)
    classes, ids = indices(6, n=4, at=at, wrong=wrong), indices(3, 2, n=6, at=at, wrong=wrong)
    yield "gather columns", lambda x, i: x.gather(1, i), (X, columns)
    yield "gather rows", lambda x, i: torch.gather(x, 0, i), (X, rows)
    yield (
        "gather numbers",
        lambda x, i: x.gather(0, i),
        (X[:, 0].clone(), indices(3, n=6, at=at, wrong=wrong)),
    )
    for dim in (0, 1):
        yield f"index_select {dim}", lambda x, i, dim=dim: x.index_select(dim, i), (X, few)
    yield "take_along_dim flat", lambda x, i: torch.take_along_dim(x, i), (X, flat)
    yield "scatter rows", lambda x, i: x.scatter(0, i, 1.0), (X, rows)
    yield "scatter", lambda x, i: x.scatter(1, i, 1.0), (X, columns)
    yield "scatter in place", lambda x, i: x.clone().scatter_(1, i, 1.0), (X, columns)
    yield "scatter a tensor", lambda x, i, s: x.scatter(1, i, s), (X, columns, NARROW)
    yield "scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (X, columns, NARROW)
    yield "scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), (X, columns, NARROW)
    yield "index_add", lambda x, i, s: x.index_add(1, i, s), (X, few, COLUMNS)
    yield "index_copy", lambda x, i, s: x.index_copy(1, i, s), (X, few, COLUMNS)
    yield "index_fill", lambda x, i: x.index_fill(1, i, 2.0), (X, few)
    yield "index_reduce", lambda x, i, s: x.index_reduce(1, i, s, "amax"), (X, few, COLUMNS)
    yield "index_put", lambda x, i, s: x.index_put((i,), s, accumulate=True), (X, few, ROWS)
    yield "take", lambda x, i: x.take(i), (X, flat)
    yield "put", lambda x, i, s: x.put(i, s), (X, flat, torch.ones(5))
    yield "embedding", lambda i, x: F.embedding(i, x), (ids, X)
    yield "embedding_bag", lambda i, x: F.embedding_bag(i, x), (ids, X)
    yield "rows", lambda x, i: x[i], (X, few)
    yield "columns", lambda x, i: x[:, i], (X, few)
    yield (
        "elements",
        lambda x, i, j: x[i, j],
        (X, indices(4, n=6, at=at, wrong=wrong), torch.arange(4)),
    )
    yield "write rows", lambda x, i: written(x, i), (X, few)
    yield "write columns", lambda x, i: written(x, (slice(None), i)), (X, few)
    yield "a row", lambda x: x[wrong], (X,)
    yield "select", lambda x: x.select(1, wrong), (X,)
    for reduction in ("mean", "sum", "none"):
        yield (
            f"cross_entropy {reduction}",
            lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
            (X, classes),
        )
        yield (
            f"nll_loss {reduction}",
            lambda x, t, r=reduction: F.nll_loss(x, t, reduction=r),
            (X, classes),
        )
    yield (
        "weighted cross_entropy",
        lambda x, t, w: F.cross_entropy(x, t, weight=w),
        (X, classes, torch.ones(4)),
    )
    yield (
        "smoothed cross_entropy",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        (X, classes),
    )
    yield "multi_margin_loss", lambda x, t: F.multi_margin_loss(x, t), (X, classes)
    yield "one_hot", lambda t, x: F.one_hot(t, 4) + x, (classes, X)


def said(call: Callable[[], Any]) -> str:
    try:
        result = call()
        return f"no error: {(gather_global_value(result) if result.is_global else result).shape}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def layouts(operands: tuple[Tensor, ...]) -> Iterator[list[Any]]:
    """Yield every mix of plain (None), broadcast and split operands; indices are not split."""
    for sbp in itertools.product((None, B, S(0), S(1)), repeat=len(operands)):
        pairs = [(s, t) for s, t in zip(sbp, operands, strict=True) if s is not None and s is not B]
        if pairs and all(t.is_floating_point() and s.dim < t.ndim for s, t in pairs):
            yield list(sbp)


def on_ranks(at: int, wrong: int, some: bool = False) -> list[str]:
    """Check that each case has the error of one device, in every layout or, with ``some``, in one
    of three."""
    everywhere, told = flow.placement.all("cpu"), []
    layout = itertools.count()
    for name, function, operands in cases(at, wrong):
        want = said(lambda f=function, ts=operands: f(*[t.clone() for t in ts]))
        assert "no error" not in want, name
        for sbp in layouts(operands):
            if some and next(layout) % 3:
                continue
            ours = [
                t.clone() if s is None else t.to_global(everywhere, B).to_global(sbp=s)
                for t, s in zip(operands, sbp, strict=True)
            ]  # type: ignore[attr-defined]
            got = said(lambda f=function, ts=ours: f(*ts))
            assert got == want, (name, at, sbp)
            told.append(got)
    return told


@pytest.mark.extended
@pytest.mark.parametrize(("at", "wrong"), [(0, 9), (-1, -9)])
def test_every_simulated_rank_tells_it(at: int, wrong: int) -> None:
    simulate(2, on_ranks, at, wrong)


@pytest.mark.parametrize(("at", "wrong"), [(0, 9), (-1, -9)])
@pytest.mark.parametrize(
    "some", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["some", "all"]
)
@pytest.mark.sweep(2, kind=lambda some, at, wrong: some)
def test_every_rank_tells_it(some: bool, at: int, wrong: int) -> None:
    first, other = run_on(2, on_ranks, at, wrong, some)
    assert first == other
    assert len(first) > (35 if some else 100)


#: Of the cases, those in which a rank refuses its own indices before it communicates.
OF_SPLIT_INDICES = (
    *("gather columns", "gather rows", "gather numbers", "index_select 0", "index_select 1"),
    *("take_along_dim flat", "scatter rows", "scatter", "scatter in place", "scatter a tensor"),
    *("scatter_add", "index_add", "index_copy", "index_fill", "embedding", "rows", "columns"),
)


def of_split_indices(at: int, wrong: int) -> list[tuple[str, str]]:
    """Return what this rank says of each case, with the index split and one part of it wrong."""
    everywhere, told = flow.placement.all("cpu"), []
    for name, function, operands in cases(at, wrong):
        if name not in OF_SPLIT_INDICES:
            continue
        want = said(lambda f=function, ts=operands: f(*[t.clone() for t in ts]))
        for of_values in (None, B, S(0)):
            ours = []
            for t in operands:
                sbp = of_values if t.is_floating_point() else S(0)
                ours.append(
                    t.clone() if sbp is None else t.to_global(everywhere, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
                )
            try:
                function(*ours)
                told.append((want, "no error"))
            except Exception as error:
                told.append((want, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    return told


@pytest.mark.parametrize(("at", "wrong"), [(0, 9), (-1, -9)])
@pytest.mark.sweep(2)
def test_a_rank_whose_part_of_a_split_index_is_wrong_tells_it_in_numbers_of_the_whole(
    at: int, wrong: int
) -> None:
    """The other rank does not know, and goes on, or gets the same error where indices are
    gathered. Nobody waits."""
    first, other = run_on(2, of_split_indices, at, wrong)
    assert len(first) == len(other) == 3 * len(OF_SPLIT_INDICES)
    for (want, one), (_, another) in zip(first, other, strict=True):
        assert want in (one, another)
        assert {one, another} <= {want, "no error"}, (want, one, another)


#: What a rank says that gets others' indices without their numbers, in gathered form.
OF_OTHERS = {
    "put": "IndexError: out of range: an index that another rank holds is outside a tensor of 24 "
    "elements.",
    "index_put": "IndexError: an index that another rank holds is out of bounds for dimensions of "
    "sizes [6]",
}


def of_owner(name: str, at: int, wrong: int, of_values: Any) -> tuple[str, str]:
    """Return what one device says of a case, and what this rank says with the indices split."""
    ((_, function, operands),) = [case for case in cases(at, wrong) if case[0] == name]
    want = said(lambda: function(*[t.clone() for t in operands]))
    everywhere, ours = flow.placement.all("cpu"), []
    for t in operands:
        sbp = of_values if t.is_floating_point() else S(0)
        ours.append(t.clone() if sbp is None else t.to_global(everywhere, B).to_global(sbp=sbp))  # type: ignore[attr-defined]
    return want, said(lambda: function(*ours))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, _, operands in cases(0, 9)
        if name not in OF_SPLIT_INDICES and not all(t.is_floating_point() for t in operands)
    ],
)
@pytest.mark.sweep(2)
def test_the_owner_of_a_wrong_index_says_what_one_device_says(name: str) -> None:
    """The other rank says the same, or that another rank holds the index, or hears of its end."""
    for (at, wrong), of_values in itertools.product(((0, 9), (-1, -9)), (None, B, S(0))):
        told = simulate(2, of_owner, name, at, wrong, of_values)
        want, owner = told[at]
        assert owner == want, (name, at, of_values, owner, want)
        other = told[-1 - at][1]
        assert other in (want, OF_OTHERS.get(name)) or other.startswith("WorldError"), other


def test_on_a_grid() -> None:
    def on_grid() -> None:
        grid, rows = flow.placement("cpu", [[0, 1], [2, 3]]), indices(3, 4, n=6, at=-1, wrong=6)
        for sbp in ((S(0), S(0)), (S(0), S(1)), (B, S(0)), (S(1), B)):
            x = X.to_global(grid, (B, B)).to_global(sbp=sbp)  # type: ignore[attr-defined]
            for index in (rows, rows.to_global(grid, (B, B))):  # type: ignore[attr-defined]
                with pytest.raises(
                    RuntimeError, match="index 6 is out of bounds for dimension 0 with size 6"
                ):
                    torch.gather(x, 0, index)
                with pytest.raises(
                    RuntimeError, match="index 6 is out of bounds for dimension 0 with size 6"
                ):
                    x.scatter(0, index, 1.0)

    simulate(4, on_grid)


def test_right_indices_pass() -> None:
    def on_two() -> None:
        everywhere = flow.placement.all("cpu")
        x = X.to_global(everywhere, B).to_global(sbp=S(0)).detach().requires_grad_()  # type: ignore[attr-defined]
        target = torch.tensor([0, -100, 3, 1, -100, 2])
        loss = F.cross_entropy(x, target, reduction="none")
        torch.testing.assert_close(
            gather_global_value(loss.detach()), F.cross_entropy(X, target, reduction="none")
        )
        loss = F.nll_loss(x, torch.tensor([0, 7, 3, 1, 7, 2]), reduction="none", ignore_index=7)
        torch.testing.assert_close(
            gather_global_value(loss.detach()),
            F.nll_loss(X, torch.tensor([0, 7, 3, 1, 7, 2]), reduction="none", ignore_index=7),
        )
        torch.testing.assert_close(
            gather_global_value(x[torch.tensor([-1, -6, 5])].detach()), X[torch.tensor([-1, -6, 5])]
        )
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            F.nll_loss(x, torch.tensor([0, 7, 3, 1, 8, 2]), reduction="none", ignore_index=8)

    simulate(2, on_two)
    run_on(2, right_indices)


def right_indices() -> None:
    x = X.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    index = torch.arange(24).view(6, 4) % 4
    torch.testing.assert_close(gather_global_value(x.gather(1, index)), X.gather(1, index))


class Gathered(flow.nn.Graph):
    def build(self, x: Tensor, index: Tensor) -> Tensor:
        return x.gather(0, index)


def test_a_graph_says_whose_numbers_its_error_has() -> None:
    """A captured program knows local tensors alone. The error names the call that knows more."""

    def body() -> None:
        everywhere = flow.placement.all("cpu")
        x, index = (
            t.to_global(everywhere, B)  # type: ignore[attr-defined]
            for t in (torch.zeros(4, 3), torch.tensor([[0, 9, 1]]))
        )
        for sbp in (B, S(0)):
            graph, split = Gathered(), x.to_global(sbp=sbp)
            with pytest.raises(RuntimeError, match="is out of bounds for dimension 0") as error:
                graph(split, index)
            told = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
            assert "call build() itself with the same arguments" in told
            with pytest.raises(RuntimeError, match="index 9 is out of bounds for dimension 0 with"):
                graph.build(split, index)

    simulate(2, body)


# ------------------------------------------------------------------------------ singular matrices

#: Functions that refuse a singular matrix, by its number in the stack.
REFUSE_SINGULAR: dict[str, Callable[[Tensor], Any]] = {
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "cholesky": torch.linalg.cholesky,
    "lu_factor": torch.linalg.lu_factor,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -1),
    "solve": lambda x: torch.linalg.solve(x, torch.ones(3, 1, dtype=x.dtype)),
    "svdvals": torch.linalg.svdvals,
}


def of_singular(layout: tuple[int, ...], grid: Any) -> dict[str, str]:
    """Return what this rank says of each function."""
    where, told = flow.placement("cpu", grid), {}
    for name, function in REFUSE_SINGULAR.items():
        x = stack(float("nan") if name == "svdvals" else 0.0)
        ours = x.to_global(where, [B] * len(layout)).to_global(sbp=[S(d) for d in layout])  # type: ignore[attr-defined]
        told[name] = refusal(function, ours)
    return told


def refusal(function: Callable[[Tensor], Any], x: Tensor) -> str:
    try:
        function(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def stack(wrong: float) -> Tensor:
    """Return a stack of 5 x 2 identity matrices, of which the one at [3, 1] is wrong."""
    matrices = torch.eye(3, dtype=torch.float64).repeat(5, 2, 1, 1)
    matrices[3, 1] = wrong
    return matrices


@pytest.mark.parametrize(
    ("layout", "grid", "owner"),
    [((0,), [0, 1], 1), ((1,), [0, 1], 1), ((0, 1), [[0, 1], [2, 3]], 3)],
    ids=["first dim", "second dim", "both"],
)
@pytest.mark.sweep(2)
def test_a_singular_matrix_has_its_number_in_the_whole_stack(
    layout: tuple[int, ...], grid: Any, owner: int
) -> None:
    """The rank that has the matrix reports it. The others have nothing to refuse."""
    ranks = run_on(2 if len(layout) == 1 else 4, of_singular, layout, grid)
    for name, function in REFUSE_SINGULAR.items():
        want = refusal(function, stack(float("nan") if name == "svdvals" else 0.0))
        assert "Batch element 7" in want, want
        assert [told[name] for told in ranks] == [
            want if rank == owner else "no error" for rank in range(len(ranks))
        ]
