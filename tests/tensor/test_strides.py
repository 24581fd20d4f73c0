"""Tests of questions about memory layout. All ranks give the answer of one device, even if a local
tensor has size 1 in a dim or is empty."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world

B, S = flow.sbp.broadcast, flow.sbp.split
SHAPES = ((4, 3), (2, 3, 2), (3, 4), (3, 3), (3, 2, 4), (1, 3), (3, 1), (1, 1))

#: The tensors to ask about: views, views of views, results of ops.
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "t": lambda x: x.transpose(0, 1),
    "t t": lambda x: x.transpose(0, 1).transpose(0, 1),
    "mT": lambda x: x.mT,
    "columns": lambda x: x[:, :2],
    "rows": lambda x: x[1:],
    "every other": lambda x: x[::2],
    "last": lambda x: x[..., :1],
    "row": lambda x: x[0],
    "column": lambda x: x[:, 0],
    "narrow": lambda x: x.narrow(1, 0, 1),
    "expand": lambda x: x.expand(2, *x.shape),
    "spread": lambda x: x[:, :1].expand(x.shape),
    "unsqueeze": lambda x: x.transpose(0, 1).unsqueeze(1),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(1)[0],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 1, 1),
    "flat": lambda x: x.reshape(-1),
    "flat t": lambda x: x.transpose(0, 1).flatten(),
    "contiguous t": lambda x: x.transpose(0, 1).contiguous(),
    "detached t": lambda x: x.detach().transpose(0, 1),
    "t detached": lambda x: x.transpose(0, 1).detach(),
    "t_": lambda x: x.clone().t_() if x.dim() == 2 else x,
    "sum": lambda x: x + 1,
    "clone": lambda x: x.clone(),
    "clone of expanded": lambda x: x[:1].expand(5, *x.shape[1:]).clone(),
    "clone of spread": lambda x: x[:, :1].expand(x.shape).clone(),
    "clone of columns": lambda x: x[:, 1:].transpose(0, 1).transpose(0, 1).clone(),
    "real part": lambda x: torch.complex(x, x).real,
    "imaginary part": lambda x: torch.complex(x, x).imag,
    "resolved": lambda x: torch.complex(x, x).conj().imag.resolve_neg(),
}
#: Questions, and functions that torch rejects for some strides. Their answer is the result, or
#: "refused".
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "is_contiguous": lambda x: x.is_contiguous(),
    "as a function": lambda x: torch.Tensor.is_contiguous(x),
    "channels_last": lambda x: (
        x.unsqueeze(0).unsqueeze(0).is_contiguous(memory_format=torch.channels_last)
        if x.dim() == 2
        else None
    ),
    "dim_order": lambda x: x.dim_order() if 1 not in x.shape and 0 not in x.stride() else None,
    "view(-1)": lambda x: x.view(-1),
    "view(shape)": lambda x: x.view(1, *x.shape, 1),
    "view(dims)": lambda x: (
        x.view(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else x.view(1, -1)
    ),
    "view(wider)": lambda x: x.view(torch.float64),
    "view(narrower)": lambda x: x.view(torch.float16).float(),
    "view(as wide)": lambda x: x.view(torch.int32),
    "view_as": lambda x: x.view_as(x.reshape(-1)),
    "unflatten": lambda x: x.unflatten(0, (1, -1)),
    "view_as_complex": lambda x: torch.view_as_complex(x),
    "reshape": lambda x: x.reshape(-1),
    "contiguous": lambda x: x.contiguous().view(-1),
    "contiguous is itself": lambda x: x.contiguous() is x,
}


def answer(question: Callable[[Any], Any], x: Any) -> Any:
    """Return the answer, or ("refused", text) if torch rejects the question. A tensor is returned
    as (shape, values) if it has the same shape on all ranks."""
    try:
        out = question(x)
    except RuntimeError as error:
        out = "refused", str(error).partition(" (")[0][:20]
    if world().size > 1:
        told = (
            world()
            .comm(tuple(range(world().size)))
            .all_gather_object(tuple(out.shape) if isinstance(out, torch.Tensor) else out)
        )
        if any(t != told[0] for t in told):
            return "ranks differ", told
    if not isinstance(out, torch.Tensor):
        return out
    value = torch.from_numpy(out.detach().numpy())
    return tuple(value.shape), (torch.view_as_real(value) if value.is_complex() else value).reshape(
        -1
    ).tolist()


def data(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def answers(
    shape: tuple[int, ...],
    laid: Callable[[torch.Tensor], Any],
    programs: tuple[str, ...] = tuple(PROGRAMS),
    questions: tuple[str, ...] = tuple(QUESTIONS),
) -> dict[str, Any]:
    """Return every answer; each question is asked of a new tensor."""
    out = {}
    for program, make in ((name, PROGRAMS[name]) for name in programs):
        for name, question in ((name, QUESTIONS[name]) for name in questions):
            try:
                x = make(laid(data(shape)))
            except (RuntimeError, IndexError, ValueError) as error:
                out[f"{program}: {name}"] = type(error).__name__
                continue
            out[f"{program}: {name}"] = answer(question, x)
    return out


def on_ranks(
    shape: tuple[int, ...], dims: list[int | None], programs: tuple[str, ...]
) -> list[dict[str, Any]]:
    where = flow.placement.all("cpu")
    return [
        answers(
            shape,
            lambda t, dim=dim: t.to_global(where, B).to_global(sbp=B if dim is None else S(dim)),
            programs,
        )
        for dim in dims
    ]  # type: ignore[misc, attr-defined]


#: Programs that move data here, or whose local tensors decide although all have size 1 in a dim:
#: their results have their own memory layout.
BY_ITSELF = (
    "row:",
    "column",
    "last",
    "rows",
    "every other",
    "narrow",
    "chunk",
    "unbind",
    "diagonal",
    "spread",
    "unfold",
    "flat",
    "expand",
    "detached",
    "t_",
)
ABOUT_MEMORY = (
    "is_contiguous",
    "as a function",
    "channels_last",
    "dim_order",
    "contiguous is itself",
)


#: Each part has every eighth program. One case in 22 is of three shapes, each with another part.
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sweep(22)
def test_ranks_answer_alike_and_as_one_device(shape: tuple[int, ...], part: int) -> None:
    dims: list[int | None] = [None, *range(len(shape))]
    programs = tuple(PROGRAMS)[part::PARTS]
    first, second = run_on(2, on_ranks, shape, dims, programs, timeout=120)
    want = answers(shape, lambda t: t, programs)
    for dim, got, other in zip(dims, first, second, strict=True):
        assert got == other
        for asked, answer in got.items():
            program, question = asked.split(": ")
            about = dim, asked, answer, want[asked]
            assert not (isinstance(answer, tuple) and answer[0] == "ranks differ"), about
            if question in ABOUT_MEMORY:
                assert (
                    answer == want[asked]
                    or f"{program}:".startswith(BY_ITSELF)
                    or dim is None
                    or shape[dim] % 2 == 0
                ), about
            # calls that one device accepts are accepted, with the same result
            elif want[asked][0] != "refused":
                assert answer == want[asked], about
            elif program == "clone of columns" and shape[0] == 1:
                continue  # the columns were moved, so the stride of their only row is another one
            elif dim is not None and shape[dim] % 2 and not f"{program}:".startswith(BY_ITSELF):
                assert answer[0] == "refused", about


#: Tensors whose local tensor is contiguous on one rank only because it has size 1 in a dim.
SINGLE_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "result of an op": lambda x: x.t() * 2,
    "sorted": lambda x: x.t().sort(0).values,
    "product": lambda x: torch.einsum("ij,kj->ki", x, x),
    "zeros": lambda x: torch.zeros_like(x.t()),
    "other dtype": lambda x: x.t().double(),
    "column": lambda x: x[:, 0],
}


def reads_of_bytes(sbps: list[Any]) -> list[Any]:
    where = flow.placement.all("cpu")
    out = []
    for make, sbp in itertools.product(SINGLE_COLUMNS.values(), sbps):
        for read in (lambda x: x.view(torch.int16), lambda x: x.view(torch.uint8)):
            x: Any = data((3, 2)).to_global(where, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            out.append(answer(read, make(x)))
    return out


def test_narrower_reads_have_one_answer_on_all_ranks() -> None:
    answers = run_on(2, reads_of_bytes, [S(0), S(1), flow.sbp.partial_sum])
    assert answers[0] == answers[1]
    assert all(said[0] != "ranks differ" for said in answers[0])


def strides_in_more_dims() -> list[tuple[int, ...]]:
    """Ask views of three dims, in one of which every local tensor has size 1 while their bases have
    parts of two sizes."""
    x = data((5, 3)).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(1))  # type: ignore[attr-defined]
    return [x[:, ::2].expand(2, 5, 2).stride(), x.t()[1:].expand(2, 2, 5).stride()]


@pytest.mark.parametrize("run", [simulate, run_on])
def test_strides_in_more_dims_are_the_same_on_all_ranks(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, strides_in_more_dims)
    assert first == second
    assert first[0] == (0, 2, 1)  # as one device, without the gaps of the base


def test_the_question_of_the_issue() -> None:
    assert run_on(2, of_the_issue) == [[False, True, "refused"]] * 2


def of_the_issue() -> list[Any]:
    where = flow.placement.all("cpu")
    g: Any = torch.arange(12.0).view(4, 3).to_global(where, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    x = g.to_global(sbp=S(1)).t()
    return [x.is_contiguous(), x.contiguous().is_contiguous(), answer(lambda x: x.view(-1), x)[0]]


def on_two_axes(some: bool) -> list[dict[str, Any]]:
    where = flow.placement("cpu", [[0, 1], [2, 3]])
    return [
        answers(
            (3, 5),
            lambda t, sbp=sbp: t.to_global(where, [B, B]).to_global(sbp=list(sbp)),
            *((FEW_PROGRAMS, FEW_QUESTIONS) if some else ()),
        )
        for sbp in ((S(0), S(1)), (S(0), S(0)), (B, S(1)))
    ]  # type: ignore[misc, attr-defined]


FEW_PROGRAMS = ("itself", "t", "columns", "last", "expand", "contiguous t")
FEW_QUESTIONS = (
    "is_contiguous", "view(-1)", "view(dims)", "view(narrower)", "view_as_complex",
    "contiguous is itself",
)  # fmt: skip


@pytest.mark.parametrize(
    "some", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["some", "all"]
)
def test_four_ranks_on_two_axes_answer_alike(some: bool) -> None:
    every = run_on(4, on_two_axes, some, timeout=120)
    assert all(of_rank == every[0] for of_rank in every)
    want = answers((3, 5), lambda t: t)
    for got in every[0]:
        assert len(got) >= len(FEW_PROGRAMS) * len(FEW_QUESTIONS)
        for asked, answer in got.items():
            assert not (isinstance(answer, tuple) and answer[0] == "ranks differ"), (asked, answer)
            assert (
                asked.split(": ")[1] in ABOUT_MEMORY
                or want[asked][0] == "refused"
                or answer == want[asked]
            ), (asked, answer, want[asked])


# ------------------------------------------------------------------------------------ shared memory

#: Views that one device supports, of tensors whose local tensors have size 1 in a dim. Some of
#: these would be views of the local tensor on some ranks, but not on all.
SHARED: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1),
    "view of t t": lambda x: x.transpose(0, 1).transpose(0, 1).view(-1),
    "view of a row": lambda x: x[1:2].view(-1),
    "unflatten": lambda x: x.unflatten(0, (1, -1)),
    "view after a view": lambda x: (x[0], x.view(-1))[1],
    "view of detached": lambda x: x.detach().view(-1),
    "reshape": lambda x: x.reshape(-1),
    "reshape of t": lambda x: x.transpose(0, 1).reshape(-1),
    "flatten of rows": lambda x: x[1:].flatten(),
    "view of sum of t": lambda x: (x.transpose(0, 1) + 1).transpose(0, 1).view(-1),
}


def written(x: Any) -> list[Any]:
    out = []
    for make in SHARED.values():
        base = x.clone()
        seen = make(base)
        seen.mul_(10)
        base.add_(1)
        seen[0] = -5
        out.append([torch.from_numpy(t.detach().numpy()).tolist() for t in (base, seen)])
    return out


def written_on_ranks(shape: tuple[int, ...]) -> list[Any]:
    g: Any = data(shape).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    return [written(g.to_global(sbp=S(d))) for d in range(len(shape)) if shape[d] % 2]


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (3, 3)], ids=str)
@pytest.mark.sweep(2)
def test_what_is_written_into_such_views_is_shared_as_on_one_device(shape: tuple[int, ...]) -> None:
    want = written(data(shape))
    for results in run_on(2, written_on_ranks, shape):
        for got in results:
            for name, g, w in zip(SHARED, got, want, strict=True):
                assert g == w, name


def trained(make: Callable[[Any], Any]) -> list[Any]:
    out = []
    for name in (
        "view",
        "view of t t",
        "view of a row",
        "contiguous t",
        "reshape of t",
        "view of sum of t",
    ):
        x: Any = make(torch.arange(12.0).view(4, 3)).requires_grad_()
        seen = SHARED[name](x) if name in SHARED else x.transpose(0, 1).contiguous().view(-1)
        (seen * torch.arange(float(seen.numel()))).sum().backward()
        out.append(torch.from_numpy(x.grad.numpy()).tolist())
    return out


def trained_on_ranks() -> list[Any]:
    return [
        trained(
            lambda t, d=d: t.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(d)).detach()
        )
        for d in (0, 1)
    ]  # type: ignore[misc]


def test_gradients_of_such_views() -> None:
    want = trained(lambda t: t)
    assert run_on(2, trained_on_ranks) == [[want, want]] * 2


# ----------------------------------------------------------------- local tensors with other strides


def given_otherwise() -> list[Any]:
    where, rank = flow.placement.all("cpu"), world().rank
    out: list[Any] = []
    for plain in (
        (torch.ones(3, 4).t() if rank else torch.ones(4, 3)),
        torch.ones(3, 4).t(),
        torch.ones(3, 2 - rank).t(),
        torch.ones(6, 2 - rank).t()[:, ::2],
    ):
        x: Any = plain.to_global(where, S(0))  # type: ignore[attr-defined]
        alone: Any = x.to_global(placement=flow.placement("cpu", [0]), sbp=B)
        for t in (x, x.t(), alone, alone.t()):
            out += [t.is_contiguous(), t.stride(), answer(lambda t: t.view(-1), t)[0] == "refused"]
    return out


def test_local_tensors_that_are_laid_otherwise() -> None:
    first, second = run_on(2, given_otherwise)
    assert first == second


def outside() -> list[Any]:
    where = flow.placement("cpu", [1])
    x: Any = torch.arange(12.0).view(4, 3).to_global(where, B)  # type: ignore[attr-defined]
    seen = [
        x,
        x.t(),
        x[:, :2],
        x.t().t(),
        x.t().contiguous(),
        x.expand(2, 4, 3),
        x[0],
        x.reshape(2, 6),
    ]
    return [(t.is_contiguous(), t.stride()) for t in seen]


def test_a_rank_outside_the_placement_answers_as_those_inside() -> None:
    first, second = run_on(2, outside)
    assert [contiguous for contiguous, _ in first] == [contiguous for contiguous, _ in second]
    x = torch.arange(12.0).view(4, 3)
    seen = [
        x,
        x.t(),
        x[:, :2],
        x.t().t(),
        x.t().contiguous(),
        x.expand(2, 4, 3),
        x[0],
        x.reshape(2, 6),
    ]
    assert [contiguous for contiguous, _ in first] == [t.is_contiguous() for t in seen]


# ------------------------------------------------------------------------ views in the same shape


def own_shapes(axes: int) -> tuple[tuple[int, ...], ...]:
    return ((5, 3), (1, 3), (3, 2, 3)) if axes == 1 else ((5, 3),)


def own_shape_layouts(axes: int) -> list[list[Any]]:
    kinds = (B, S(0), S(1), flow.sbp.partial_sum)
    return [[a] if axes == 1 else [a, b] for a in kinds for b in (kinds if axes == 2 else (B,))]


#: Each part has every third layout, and so every entry on each of two axes.
PARTS_OF_LAYOUTS = 3


def views_in_own_shape(axes: int, part: int) -> list[Any]:
    """Return, for some layouts of a leaf, what a hook on it and writes into its views give."""
    ranks: Any = [0, 1] if axes == 1 else [[0, 1], [2, 3]]
    where, out = flow.placement("cpu", ranks), []
    for sbp in own_shape_layouts(axes)[part::PARTS_OF_LAYOUTS]:
        for shape in own_shapes(axes):
            # a detached tensor has an alias, so that its memory order is not laid anew
            x: Any = data(shape).to_global(where, [B] * axes).to_global(sbp=sbp).detach()  # type: ignore[attr-defined]
            for view in (x.view(shape), x.reshape(shape), x.view_as(x), x.transpose(0, 1)):
                seen = view.view(view.shape)
                seen.add_(1)
                assert seen.stride() == view.stride(), (sbp, shape)
            out.append(torch.from_numpy(x.numpy()).tolist())
            leaf, sums = x.requires_grad_(), []
            torch.autograd.graph.register_multi_grad_hook(
                [leaf], lambda grads, sums=sums: sums.append(grads[0].sum().item())
            )
            (leaf * 2).sum().backward()
            out.append(sums)
    return out


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("part", range(PARTS_OF_LAYOUTS))
@pytest.mark.sweep(PARTS_OF_LAYOUTS, kind=lambda axes, part: axes)
def test_a_view_in_the_same_shape_is_a_view_of_the_local_tensor(axes: int, part: int) -> None:
    want: list[Any] = []
    for _ in own_shape_layouts(axes)[part::PARTS_OF_LAYOUTS]:
        for shape in own_shapes(axes):
            want += [(data(shape) + 4).tolist(), [2.0 * torch.Size(shape).numel()]]
    assert run_on(2 * axes, views_in_own_shape, axes, part) == [want] * 2 * axes


LIKES: dict[str, Callable[[Any], Any]] = {
    "empty": torch.empty_like,
    "zeros": torch.zeros_like,
    "full": lambda x: torch.full_like(x, 2.0),
    "ones of another dtype": lambda x: torch.ones_like(x, dtype=torch.float64),
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "randint": lambda x: torch.randint_like(x, 0, 50),
    "rand by rows": lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
}
LIKE_WHAT: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "t": lambda x: x.t(),
    "t of columns": lambda x: x[:, 1:].t(),
    "t of rows": lambda x: x[1:].t(),
    "expanded": lambda x: x[:1].t().expand(x.shape[1], 4),
}


#: Each part has every seventh case, and so every shape, function and view.
PARTS_OF_LIKES = 7


def made_like(make: Callable[..., Any], part: int) -> list[Any]:
    """Return the strides of new tensors like a view, and the random numbers in them."""
    out = []
    cases = itertools.product(((5, 3), (3, 2), (4, 2)), LIKES.values(), LIKE_WHAT.values())
    for shape, like, what in itertools.islice(cases, part, None, PARTS_OF_LIKES):
        x = what(make(*shape))
        torch.manual_seed(3)
        y = like(x)
        numbers = y.numpy().tolist() if like is not torch.empty_like else None
        # the stride of a dim of size 1 says nothing
        strides = [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1]
        out.append((strides, y.is_contiguous(), numbers))
    return out


def made_like_on_ranks(part: int) -> list[list[Any]]:
    placement = flow.placement.all("cpu")
    return [
        made_like(
            lambda *shape, sbp=sbp: torch.zeros(shape).to_global(placement, B).to_global(sbp=sbp),
            part,
        )  # type: ignore[attr-defined]
        for sbp in (B, S(0), S(1))
    ]


@pytest.mark.parametrize("part", range(PARTS_OF_LIKES))
@pytest.mark.sweep(PARTS_OF_LIKES)
def test_a_tensor_made_like_another_has_its_memory_order(part: int) -> None:
    """Random numbers are drawn in memory order, so they depend on it too."""
    want = made_like(lambda *shape: torch.zeros(shape), part)
    for found in run_on(2, made_like_on_ranks, part):
        assert found == [want] * 3


def gradient_strides(make: Callable[[], Any]) -> list[Any]:
    """Return the strides of the gradients of transposed leaves."""
    first, second = make().t().clone().detach().requires_grad_(), make().requires_grad_()
    second.data = make().t()
    out = []
    for leaf in (first, second):
        (leaf * leaf).sum().backward()
        out.append((leaf.grad.stride(), leaf.grad.is_contiguous(), leaf.grad.numpy().tolist()))
    return out


def gradient_strides_on_ranks() -> list[list[Any]]:
    placement, square = flow.placement.all("cpu"), torch.arange(9.0).view(3, 3)
    return [
        gradient_strides(lambda sbp=sbp: square.to_global(placement, B).to_global(sbp=sbp).detach())  # type: ignore[attr-defined,misc]
        for sbp in (B, S(0), S(1), flow.sbp.partial_sum)
    ]


def test_a_gradient_has_the_strides_of_its_leaf() -> None:
    want = gradient_strides(lambda: torch.arange(9.0).view(3, 3))
    for found in run_on(2, gradient_strides_on_ranks):
        assert found == [want] * 4


SEVERAL: dict[str, Any] = {
    "chunk": lambda t: t.chunk(2, -1),
    "unbind": lambda t: t.unbind(-1),
    "split": lambda t: t.split(1, 0),
    "tensor_split": lambda t: t.tensor_split(2, 1),
    "hsplit": lambda t: t.hsplit([1]),
    "flatten": lambda t: (t.flatten(),),
}


def views_of_parts_of_size_1() -> list[str]:
    wrong = []
    everywhere = flow.placement.all("cpu")
    for dim, shape, turned in itertools.product((0, 1), ((2, 6), (4, 3), (3, 2)), (False, True)):
        for name, call in SEVERAL.items():
            for again in range(3):  # later calls take a shorter path
                x = torch.arange(float(math.prod(shape))).view(shape)
                g: Any = x.to_global(everywhere, B).to_global(sbp=S(dim))  # type: ignore[attr-defined]
                if turned:
                    x, g = x.T, g.T
                want, found = call(x), call(g)
                strides = [t.stride() for t in want], [t.stride() for t in found]
                want[0].mul_(3)
                found[0].mul_(3)
                same = all(
                    torch.equal(a, b.to_global(sbp=B).to_local())
                    for a, b in zip((x, *want), (g, *found), strict=True)
                )
                if type(want) is not type(found) or not same:
                    wrong.append(f"{name} of {shape} {dim} {turned} {again}: {strides}")
    return wrong


def test_views_of_parts_of_size_1_write_into_their_base_as_on_one_device() -> None:
    assert run_on(2, views_of_parts_of_size_1) == [[], []]
