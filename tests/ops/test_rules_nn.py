"""Tests of normalisation, attention, convolution, pooling and losses: each signature against plain
torch, and through the full library on simulated ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.device import DEVICE
from support.everywhere import GRIDS, compare, full
from support.oracle import check
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape))
    )


def ids(top: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(top))


tril = torch.ones(6, 6).tril().bool()
logp = x(5, 4).log_softmax(1)
soft = x(5, 4).softmax(1)
signs = ids(2, 5) * 2 - 1
grid2 = x(3, 2, 5, 2).tanh()
A = F.scaled_dot_product_attention

NORMS: list[tuple[Any, ...]] = [
    (F.layer_norm, x(5, 6), (6,), x(6), x(6)), (F.layer_norm, x(5, 3, 6), (3, 6)),
    (F.layer_norm, x(1, 6), (6,), x(6)), (F.rms_norm, x(5, 6), (6,), x(6)),
    (F.rms_norm, x(5, 3), (3,)),
    (F.group_norm, x(3, 6, 5), 2, x(6), x(6)), (F.group_norm, x(3, 6), 3),
    (F.group_norm, x(1, 6, 2, 2), 6, x(6), x(6)),
    (F.instance_norm, x(3, 4, 5), None, None, x(4), x(4)),
    (F.batch_norm, x(5, 6, 4), None, None, x(6), x(6), True),
    (F.batch_norm, x(5, 3), None, None, None, None, True),
    (F.local_response_norm, x(3, 6, 5), 2), (F.normalize, x(5, 4)), (F.normalize, x(5, 4), 3, 0),
]  # fmt: skip
LAYERS: list[tuple[Any, ...]] = [
    (A, x(3, 4, 6, 5), x(3, 4, 7, 5), x(3, 4, 7, 5)),
    (A, x(1, 4, 3, 2), x(1, 4, 3, 2), x(1, 4, 3, 2)), (A, x(6, 5), x(7, 5), x(7, 3)),
    (A, x(3, 6, 5), x(1, 7, 5), x(3, 7, 5)),
    (A, x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 3, 6, 2), tril),
    (A, x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 1, 1, 6)),
    (A, x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 3, 6, 2), x(3, 6, 6)),
    (F.glu, x(5, 4)), (F.glu, x(6, 3), 0), (F.prelu, x(5, 3, 2), x(3)), (F.prelu, x(5), x(1)),
    (F.dropout, x(5, 3), 0.5, False),
    (F.dropout2d, x(5, 3, 2, 2), 0.5, False),
    (torch.gru_cell, x(5, 3), x(5, 2), x(6, 3), x(6, 2), x(6), x(6)),
    (torch.lstm_cell, x(5, 3), [x(5, 2), x(5, 2)], x(8, 3), x(8, 2)),
]  # fmt: skip
SPACE: list[tuple[Any, ...]] = [
    (F.conv1d, x(3, 4, 9), x(5, 4, 3), x(5), 1, 1), (F.conv1d, x(1, 1, 5), x(1, 1, 3)),
    (F.conv1d, x(4, 9), x(5, 4, 3), x(5)),
    (F.conv2d, x(3, 4, 8, 7), x(5, 4, 3, 3), x(5), 2, 1),
    (F.conv2d, x(3, 4, 8, 7), x(6, 2, 3, 3), x(6), 1, 0, 1, 2),
    (F.conv2d, x(2, 3, 4, 4), x(3, 1, 3, 3), None, 1, "same", 1, 3),
    (F.conv3d, x(2, 2, 3, 3, 3), x(3, 2, 2, 2, 2)),
    (F.conv_transpose1d, x(3, 4, 5), x(4, 2, 3), x(2)),
    (F.conv_transpose2d, x(3, 4, 5, 4), x(4, 5, 3, 3), None, 2),
    (F.conv_transpose2d, x(2, 4, 3, 3), x(4, 3, 2, 2), x(6), 1, 0, 0, 2),
    (F.max_pool2d, x(3, 4, 8, 6), 2), (F.max_pool1d, x(3, 4, 6), 2),
    (torch.max_pool1d, x(3, 4, 6), 2), (F.avg_pool2d, x(3, 4, 8, 6), 2),
    (F.avg_pool1d, x(4, 6), 3), (F.adaptive_avg_pool2d, x(3, 4, 8, 6), 1),
    (F.adaptive_avg_pool1d, x(3, 4, 6), 2), (F.adaptive_max_pool2d, x(3, 4, 8, 6), (2, 3)),
    (F.lp_pool1d, x(3, 4, 6), 2, 2),
    (F.avg_pool3d, x(1, 3, 4, 4, 4), 2), (F.max_pool3d, x(3, 1, 4, 4, 4), 2),
    (F.interpolate, x(3, 4, 5), None, 2), (F.interpolate, x(3, 4, 5, 2), (7, 3), None, "bilinear"),
    (F.grid_sample, x(3, 4, 5, 4), grid2, "bilinear", "zeros", False),
    (F.affine_grid, x(3, 2, 3), [3, 2, 4, 5], False),
    (F.unfold, x(3, 4, 5, 4), 2), (F.unfold, x(4, 5, 4), (2, 3)), (F.fold, x(3, 16, 12), (5, 4), 2),
]  # fmt: skip
CE, NLL = F.cross_entropy, F.nll_loss
LOSSES: list[tuple[Any, ...]] = [
    *[(f, x(5, 4), x(5, 4) * 2) for f in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.poisson_nll_loss)],
    *[(partial(f, reduction=r), x(5, 4), x(5, 4) * 2) for f in (F.mse_loss, F.l1_loss,
        F.smooth_l1_loss) for r in ("none", "sum")],
    (partial(F.mse_loss, size_average=False), x(5, 3), x(5, 3)),
    (partial(F.l1_loss, reduce=False), x(5, 3), x(5, 3)),
    (F.binary_cross_entropy, soft, soft), (F.binary_cross_entropy_with_logits, x(5, 4), soft),
    *[(partial(F.kl_div, reduction=r), logp, soft) for r in ("mean", "sum", "batchmean", "none")],
    (partial(F.kl_div, log_target=True, reduction="batchmean"), logp, logp + 0.1),
    (F.soft_margin_loss, x(5), signs), (F.hinge_embedding_loss, x(5), signs),
    (F.margin_ranking_loss, x(5), x(5) * 2, signs),
    (F.multi_margin_loss, x(5, 4), ids(4, 5)), (F.multilabel_margin_loss, x(5, 4), ids(4, 5, 4)),
    (partial(F.multilabel_margin_loss, reduction="none"), x(4), ids(4, 4)),
    (F.cosine_embedding_loss, x(5, 3), x(5, 3) * 2, signs),
    (F.triplet_margin_loss, x(5, 3), x(5, 3) * 2, x(5, 3) ** 2),
    (F.multilabel_soft_margin_loss, x(5, 4), soft),
    (F.multilabel_soft_margin_loss, x(5, 4), soft[:1]),
    (F.multilabel_soft_margin_loss, x(3, 4, 2), x(3, 4, 2)),
    *[(partial(F.triplet_margin_loss, reduction=r), x(1, 3), x(5, 3) * 2,
        x(5, 3) ** 2) for r in ("none", "mean")],
    *[(partial(F.triplet_margin_loss, reduction=r), x(3, 4, 2), x(3, 4, 2) * 2,
        x(3, 4, 2) ** 2) for r in ("none", "mean")],
    *[(partial(F.cosine_embedding_loss, reduction=r), x(5, 3), x(5, 3) * 2,
        signs[:1]) for r in ("none", "sum", "mean")],
    (F.cosine_embedding_loss, x(1, 3), x(5, 3) * 2, signs),
    (F.cosine_embedding_loss, x(3), x(3) * 2, signs[0]),
    *[(partial(f, reduction=r), x(10, 7).log_softmax(1), ids(7, 10)) for f in (CE,
        NLL) for r in ("none", "sum", "mean")],
    (CE, x(3, 5, 4), ids(5, 3, 4)), (CE, x(5), ids(5)), (NLL, x(3, 5, 2, 2), ids(5, 3, 2, 2)),
    (partial(CE, ignore_index=2), x(10, 7), ids(7, 10)),
    (partial(CE, label_smoothing=0.1, ignore_index=3), x(10, 7), ids(7, 10)),
    (partial(CE, label_smoothing=0.1, reduction="sum"), x(10, 7), ids(7, 10)),
    *[(partial(CE, label_smoothing=s, reduction=r), x(5, 4), soft) for s in (0.0,
        0.1) for r in ("none", "sum", "mean")],
    (CE, x(3, 4, 2), x(3, 4, 2).softmax(1)),
    *[(F.mse_loss, x(5, 4), x(5, 4) * 2, None, None, r, x(5, 4).square()) for r in ("none", "sum",
        "mean")],
    *[(F.huber_loss, x(5, 4), x(5, 4) * 2, r, 0.5, x(5, 4).square()) for r in ("none", "sum",
        "mean")],
]  # fmt: skip
WEIGHTED = "weight" in inspect.signature(F.l1_loss).parameters


def name(row: tuple[Any, ...]) -> str:
    f = row[0]
    shown = (
        f"{f.func.__name__} {f.keywords}"
        if isinstance(f, partial)
        else getattr(f, "__name__", "pool")
    )
    return (
        f"{shown} "
        f"{[tuple(a.shape) if isinstance(a, torch.Tensor) else a if not isinstance(a, list) else len(a) for a in row[1:]]}"  # noqa: E501
    )[:90]


def _checked(row: tuple[Any, ...]) -> None:
    f, *args = row
    kwargs = {}
    if isinstance(f, partial):
        f, kwargs = f.func, f.keywords
    if f is not F.normalize:  # F.normalize runs as the Python function that it is
        check(f, *args, most=15, **kwargs)


@pytest.mark.parametrize("row", NORMS + LAYERS, ids=name)
@pytest.mark.sweep(2)
def test_every_signature_of_layers(row: tuple[Any, ...]) -> None:
    _checked(row)


@pytest.mark.parametrize("row", SPACE, ids=name)
@pytest.mark.sweep(3)
def test_every_signature_in_space(row: tuple[Any, ...]) -> None:
    _checked(row)


@pytest.mark.parametrize("row", LOSSES, ids=name)
@pytest.mark.sweep(5)
def test_every_signature_of_losses(row: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch warns of deprecated arguments
        _checked(row)


@pytest.mark.long
@pytest.mark.skipif(not WEIGHTED, reason="this torch's l1_loss has no weight")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.sweep(3)
def test_what_torch_forgets_on_the_way_is_not_lost(reduction: str) -> None:
    """Some torch functions drop an argument before they dispatch the call; the argument still has
    its effect."""
    compare(
        lambda a, b, w: F.l1_loss(a, b, reduction=reduction, weight=w),
        x(5, 4),
        x(5, 4) * 2,
        x(5, 4).square(),
        fallback=True,
    )
    compare(lambda a, b: F.l1_loss(a, b, reduction=reduction), x(5, 4), x(5, 4) * 2)

    class Weighted(flow.nn.Graph):
        def build(self, a: Any, b: Any, w: Any) -> Any:
            return F.l1_loss(a, b, reduction=reduction, weight=w)

    def in_a_graph() -> None:
        line = flow.placement("cpu", [0, 1])
        parts = [
            t.to_global(line, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
            for t in (x(5, 4), x(5, 4) * 2, x(5, 4).square())
        ]  # type: ignore[attr-defined]
        want = F.l1_loss(x(5, 4), x(5, 4) * 2, reduction=reduction, weight=x(5, 4).square())
        torch.testing.assert_close(full(Weighted()(*parts)), want)

    simulate(2, in_a_graph)


def test_the_result_of_a_chain_of_products_goes_where_it_is_asked_for() -> None:
    def on_ranks() -> None:
        line = flow.placement("cpu", [0, 1])
        out = flow.zeros(3, 5, dtype=torch.float64, placement=line, sbp=flow.sbp.split(1))
        torch.chain_matmul(
            x(3, 4).to_global(line, flow.sbp.broadcast),
            x(4, 5).to_global(line, flow.sbp.broadcast),
            out=out,
        )  # type: ignore[attr-defined]
        torch.testing.assert_close(full(out), x(3, 4) @ x(4, 5))

    # PyTorch warns that chain_matmul is deprecated. Ranks are threads and share the filters.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        simulate(2, on_ranks)


#: Calls that torch rejects. On meta tensors it gives another error, or none.
REFUSED: list[tuple[Any, ...]] = [
    *[(f, x(6, 4), ids(4, 6), x(n)) for f in (CE, NLL) for n in (3, 5, 1)],
    (CE, x(6, 4), soft[:1].expand(6, 4), x(3)), (CE, x(3, 4, 5), ids(4, 3, 5), x(5)),
    (NLL, x(3, 4, 2, 2), ids(4, 3, 2, 2), x(3)),
    (F.multi_margin_loss, x(6, 4), ids(4, 6), 1, 1.0, x(3)), (CE, x(6, 4), ids(4, 5)),
    (CE, x(6, 4), x(6)),
    (F.binary_cross_entropy, x(6, 4).sigmoid(), soft[:, :3]),
    (partial(F.binary_cross_entropy_with_logits, pos_weight=x(3)), x(5, 4), soft),
    (F.mse_loss, x(6, 4), x(6, 3)), (F.multi_margin_loss, x(6, 4), ids(4, 5)),
    (F.cosine_embedding_loss, x(6, 4), x(6, 4), signs),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=name)
def test_a_wrong_call_is_refused_in_the_words_of_torch(row: tuple[Any, ...]) -> None:
    f, *args = row

    def refusal(*args: Any) -> Exception:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch warns of shapes that differ
            with pytest.raises((RuntimeError, ValueError)) as caught:
                f(*args)
        return caught.value

    def on_ranks(entry: Any) -> None:
        line = flow.placement("cpu", [0, 1])
        given = [
            t.to_global(line, flow.sbp.broadcast).to_global(sbp=entry)
            if isinstance(t, torch.Tensor)
            else t
            for t in args
        ]  # type: ignore[attr-defined]
        told = refusal(*given)
        assert type(told) is type(want)
        assert str(told)[:40] == str(want)[:40]

    want = refusal(*args)
    for entry in (flow.sbp.broadcast, flow.sbp.split(0)):
        simulate(2, on_ranks, entry)


@pytest.mark.parametrize("row", NORMS + LAYERS + SPACE + LOSSES, ids=name)
@pytest.mark.sweep(9)
def test_on_global_tensors(row: tuple[Any, ...]) -> None:
    compare(row[0], *row[1:], grids=((3,), (2, 2)), draws=2, fallback=any(row is r for r in LOSSES))


def constant(function: Any, *which: int) -> Any:
    """Return the function with some of its operands detached."""
    return lambda *args: function(*[a.detach() if i in which else a for i, a in enumerate(args)])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", [F.nll_loss, F.cross_entropy])
@pytest.mark.sweep(4)
def test_bytes_as_classes(function: Any, reduction: str) -> None:
    classes = torch.tensor([3, 0, 1, 1, 2], dtype=torch.uint8)
    compare(
        function,
        torch.linspace(-2, 1, 20, dtype=torch.float64).view(5, 4),
        classes,
        reduction=reduction,
        ignore_index=1,
    )


@pytest.mark.extended
def test_operands_without_gradient() -> None:
    with torch.no_grad():
        check(F.batch_norm, x(5, 3, 2, 2), x(3), x(3) ** 2, x(3), x(3), False, most=25)
        check(F.cross_entropy, x(10, 7), ids(7, 10), x(7).abs(), reduction="sum", most=25)
        check(F.binary_cross_entropy_with_logits, x(5, 4), soft, pos_weight=x(4).abs(), most=25)
    compare(constant(F.batch_norm, 1, 2), x(5, 3, 2, 2), x(3), x(3) ** 2, x(3), x(3))
    for kwargs in (
        {},
        {"ignore_index": 2, "label_smoothing": 0.1},
        {"reduction": "none", "label_smoothing": 0.1},
    ):
        compare(constant(partial(F.cross_entropy, **kwargs), 2), x(10, 7), ids(7, 10), x(7).abs())
    compare(constant(F.nll_loss, 2), x(10, 7), ids(7, 10), x(7).abs())
    compare(
        constant(lambda i, t, w: F.cross_entropy(i, t, w, label_smoothing=0.1), 2),
        x(5, 4),
        soft,
        x(4).abs(),
    )
    compare(
        constant(lambda i, t, w: F.binary_cross_entropy_with_logits(i, t, pos_weight=w), 2),
        x(5, 4),
        soft,
        x(4).abs(),
    )
    compare(lambda i, t, v: F.gaussian_nll_loss(i, t, v.exp()), x(5), x(5) * 2, x(5) ** 2)


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS[::-1], ids=str)
@pytest.mark.sweep(3)
def test_batch_norm_follows_the_whole_batch(grid: tuple[int, ...]) -> None:
    def run(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer = torch.nn.BatchNorm2d(3, dtype=torch.float64)
        if value.is_global:
            layer = layer.to_global(
                placement=value.placement, sbp=[flow.sbp.broadcast] * value.placement.axes
            )
        out = layer(layer(value))
        layer.eval()
        return out, layer(value), layer.running_mean, layer.running_var

    compare(run, x(5, 3, 2, 2), grids=[grid])
    compare(run, x(0, 3, 2, 2), grids=[grid])


@pytest.mark.extended
def test_fractional_pools_of_given_samples() -> None:
    """Samples beyond the batch size are ignored. Without a batch dim the first sample is used."""
    for space in (2, 3):
        pool = partial(getattr(F, f"fractional_max_pool{space}d"), kernel_size=2, output_size=2)
        for lead in ((3, 4), (1, 4), (4,)):
            for many in (lead[0] if len(lead) > 1 else 1, 5):
                samples = torch.rand(
                    many,
                    4,
                    space,
                    dtype=torch.float64,
                    generator=torch.Generator().manual_seed(many),
                )
                compare(
                    lambda v, s, pool=pool: pool(v, _random_samples=s.detach()),
                    x(*lead, *[4] * space),
                    samples,
                    draws=3,
                )


GROUPS: dict[str, Callable[[], None]] = {
    "groups": lambda: check(A, x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2), enable_gqa=True),
    "causal": lambda: check(A, x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 3, 6, 2), is_causal=True),
    "groups on ranks": lambda: compare(
        partial(A, enable_gqa=True), x(2, 4, 6, 2), x(2, 2, 6, 2), x(2, 2, 6, 2)
    ),
    "causal on ranks": lambda: compare(
        partial(A, is_causal=True), x(2, 3, 6, 2), x(2, 3, 6, 2), x(2, 3, 6, 2)
    ),
    "groups with a mask": lambda: check(
        A, x(2, 6, 3, 2), x(2, 3, 5, 2), x(2, 3, 5, 2), x(1, 6, 3, 5), enable_gqa=True, most=25
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("compared", GROUPS.values(), ids=GROUPS)
@pytest.mark.sweep(2)
def test_attention_of_groups(compared: Callable[[], None]) -> None:
    compared()


N = torch.nn
MODULES: list[tuple[Any, ...]] = [
    (
        lambda: N.MultiheadAttention(6, 2, batch_first=True),
        lambda m, v: m(v, v, v, need_weights=False)[0],
    ),
    (lambda: N.MultiheadAttention(6, 3), lambda m, v: m(v, v, v)),
    (lambda: N.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), lambda m, v: m(v)),
    (lambda: N.GRU(6, 4, 2, batch_first=True), lambda m, v: m(v)),
    (lambda: N.LSTM(6, 4, bidirectional=True), lambda m, v: m(v)),
    (lambda: N.GRUCell(6, 3), lambda m, v: m(v[0])),
    (lambda: N.Linear(6, 3), lambda m, v: m(v)),
    (lambda: N.GroupNorm(3, 6), lambda m, v: m(v.transpose(1, 2))),
    (lambda: N.RMSNorm(6), lambda m, v: m(v)),
    (lambda: N.Bilinear(6, 6, 2), lambda m, v: m(v, v)),
]


@pytest.mark.parametrize("row", MODULES, ids=lambda row: type(row[0]()).__name__)
@pytest.mark.sweep(6)
def test_modules(row: tuple[Any, ...]) -> None:
    torch.manual_seed(1)
    make, call = row
    model = make().double()
    names, parameters = zip(*[(n, p.detach()) for n, p in model.named_parameters()], strict=True)

    def plain(value: torch.Tensor, *params: torch.Tensor) -> Any:
        mine = make().double()
        for n, p in zip(names, params, strict=True):
            owner, _, leaf = n.rpartition(".")
            part = mine.get_submodule(owner)
            del part._parameters[leaf]
            setattr(part, leaf, p)
        return call(mine, value)

    compare(plain, x(5, 3, 6), *parameters, grids=((2,), (2, 2)), draws=2)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [N.LSTM, N.GRU])
@pytest.mark.sweep(3)
def test_packed_sequences(layer: Any, batch_first: bool) -> None:
    """Sequences with global lengths in any order are packed, run and padded again."""
    torch.manual_seed(1)
    rnn = layer(3, 2, bidirectional=True, batch_first=batch_first).double()
    R = torch.nn.utils.rnn

    def run(v: torch.Tensor, lengths: torch.Tensor, *weights: torch.Tensor) -> Any:
        mine = layer(3, 2, bidirectional=True, batch_first=batch_first).double()
        for n, p in zip([n for n, _ in rnn.named_parameters()], weights, strict=True):
            del mine._parameters[n]
            setattr(mine, n, p)
        out, states = mine(
            R.pack_padded_sequence(v, lengths.cpu(), batch_first=batch_first, enforce_sorted=False)
        )
        back, found = R.pad_packed_sequence(
            out, batch_first=batch_first, padding_value=-1.0, total_length=6
        )
        assert found.tolist() == lengths.tolist()
        return back, states

    lengths = torch.tensor([2, 5, 1, 4])
    compare(
        run,
        x(4, 5, 3) if batch_first else x(5, 4, 3),
        lengths,
        *[p.detach() for p in rnn.parameters()],
        grids=((2,), (2, 2)),
        draws=2,
    )
    packed = lambda v: R.pack_padded_sequence(v, [5, 4, 4, 1], batch_first=batch_first).data  # noqa: E731
    compare(packed, x(4, 5, 3) if batch_first else x(5, 4, 3), grids=((2,),), draws=3)


def test_factors_that_are_tensors() -> None:
    compare(
        lambda a, b, t: torch.add(a, b, alpha=t.detach()), x(5, 4), x(5, 4) * 2, x(1)[0], draws=3
    )
    compare(
        lambda a, b, t: (
            a.clone().add_(b, alpha=t.detach()) + torch.addcmul(a, b, b, value=t.detach())
        ),
        x(5, 4),
        x(5, 4) * 2,
        x(1)[0],
        draws=3,
    )


def test_dropout() -> None:
    compare(lambda v: F.dropout(v, 0.0) + F.dropout(v, 1.0) + F.dropout(v, 0.3, False), x(5, 4))


CURVED: list[tuple[str, Any]] = [
    ("softmax", lambda v: (F.softmax(v, 1) ** 2).sum()),
    ("cross entropy", lambda v: F.cross_entropy(v, ids(6, 5))),
    ("layer norm", lambda v: (F.layer_norm(v, (6,)) ** 3).sum()),
    ("batch norm", lambda v: (F.batch_norm(v, None, None, training=True) ** 3).sum()),
    ("amax", lambda v: (v.amax(1) ** 3).sum()), ("norm", lambda v: v.norm() ** 3),
    ("std", lambda v: (v.std(1) ** 3).sum()),
    ("convolution",
        lambda v: F.conv1d(v[None], v[:2, None, :3].expand(2, 5, 3).contiguous()).pow(2).sum()),
]  # fmt: skip


@pytest.mark.parametrize("row", CURVED, ids=lambda row: row[0])
@pytest.mark.sweep(2)
def test_gradient_of_the_gradient(row: Any) -> None:
    def run(value: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(row[1](value), value, create_graph=True)
        return slope

    compare(run, x(5, 6), grids=((2,),))


#: Batches of two samples: the third rank's local tensor is empty in most layouts.
FEW: list[tuple[Any, ...]] = [
    (F.conv1d, x(2, 4, 3), x(5, 4, 3), x(5)),
    (F.conv2d, x(2, 4, 3, 4), x(4, 2, 2, 2), x(4), 1, 0, 1, 2),
    (F.conv_transpose2d, x(2, 4, 3, 3), x(4, 2, 3, 3), x(2)),
    (F.batch_norm, x(2, 2, 3), x(2), x(2) ** 2, x(2), x(2)),
    (F.group_norm, x(2, 6, 4), 1, x(6), x(6)),
    (F.instance_norm, x(2, 2, 4), None, None, x(2), x(2)),
    (F.bilinear, x(2, 3), x(2, 3), x(2, 3, 3), x(2)), (F.pad, x(2, 3, 4), (1, 1), "reflect"),
    (F.pad, x(2, 3, 4), (1, 1), "replicate"),
    (F.interpolate, x(2, 1, 4), 8), (F.unfold, x(2, 1, 4, 4), 2), (F.avg_pool1d, x(2, 1, 4), 2),
    (lambda table: F.embedding(ids(4, 5), table), x(4, 2)),
]  # fmt: skip


@pytest.mark.parametrize("row", FEW, ids=name)
@pytest.mark.sweep(2)
def test_gradient_of_the_gradient_where_a_rank_has_nothing(row: Any) -> None:
    """All ranks must build the same backward graph, or some ranks wait for others."""
    function, *args = row
    trained = [
        i
        for i, a in enumerate(args)
        if isinstance(a, torch.Tensor) and not (function is F.batch_norm and i in (1, 2))
    ]

    def second(operands: Any) -> list[Any]:
        leaves = [operands[i] for i in trained]
        first = torch.autograd.grad(
            function(*operands).sum(), leaves, create_graph=True, allow_unused=True
        )
        bent = [g for g in first if g is not None and g.requires_grad]
        found = (
            torch.autograd.grad(sum((g * g).sum() for g in bent), leaves, allow_unused=True)
            if bent
            else []
        )
        return [*first, *found]

    want = second(
        [
            a.clone().requires_grad_(i in trained) if isinstance(a, torch.Tensor) else a
            for i, a in enumerate(args)
        ]
    )

    def body() -> None:
        line = flow.placement("cpu", [0, 1, 2])
        for dim in (0, 1):
            for params in (flow.sbp.broadcast, flow.sbp.split(0)):
                put = [
                    a.to_global(line,
                        flow.sbp.broadcast).to_global(sbp=flow.sbp.split(dim) if a is args[0] else params).detach().requires_grad_(i in trained)  # noqa: E501
                    if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)
                ]  # fmt: skip
                got = second(put)
                assert len(got) == len(want)
                for g, w in zip(got, want, strict=True):
                    assert (
                        (w is None or not w.any())
                        if g is None
                        else torch.allclose(
                            full(g), torch.zeros(g.shape).double() if w is None else w.detach()
                        )
                    )

    simulate(3, body, timeout=20.0)


ALL = "all_reduce"
TRAFFIC: list[tuple[str, Any, list[tuple[tuple[int, ...], Any]], list[str], list[str]]] = [
    # name; function; shapes and sbp of operands; collectives forward; in backward of the sum
    (
        "softmax over split classes",
        lambda v: F.softmax(v, 1),
        [((64, 32), flow.sbp.split(1))],
        [ALL, ALL],
        [ALL],
    ),
    (
        "logsumexp over split classes",
        lambda v: v.logsumexp(1),
        [((64, 32), flow.sbp.split(1))],
        [ALL, ALL],
        [ALL],
    ),
    (
        "layer norm of a split batch",
        lambda v: F.layer_norm(v, (32,)),
        [((64, 32), flow.sbp.split(0))],
        [],
        [],
    ),
    (
        "layer norm over a split dim",
        lambda v: F.layer_norm(v, (32,)),
        [((64, 32), flow.sbp.split(1))],
        [ALL, ALL],
        [ALL, ALL],
    ),
    (
        "batch norm of a split batch",
        lambda v: F.batch_norm(v, None, None, training=True),
        [((64, 32), flow.sbp.split(0))],
        [ALL, ALL],
        [ALL, ALL],
    ),
    ("mean", torch.mean, [((64, 32), flow.sbp.split(0))], [], []),
    (
        "norm, and its reduction where backward starts",
        torch.norm,
        [((64, 32), flow.sbp.split(0))],
        [],
        [ALL, ALL],
    ),
    ("mse", F.mse_loss, [((64, 32), flow.sbp.split(0)), ((64, 32), flow.sbp.split(0))], [], []),
    ("attention by heads", A, [((2, 4, 6, 5), flow.sbp.split(1))] * 3, [], []),
    (
        "linear by columns",
        F.linear,
        [((64, 32), flow.sbp.broadcast), ((16, 32), flow.sbp.split(0))],
        [],
        [ALL],
    ),
    (
        "linear by rows",
        F.linear,
        [((64, 32), flow.sbp.split(1)), ((16, 32), flow.sbp.split(1))],
        [],
        [],
    ),
    (
        "convolution of a split batch",
        F.conv1d,
        [((4, 2, 9), flow.sbp.split(0)), ((3, 2, 3), flow.sbp.broadcast)],
        [],
        [ALL],
    ),
]


@pytest.mark.parametrize("row", TRAFFIC, ids=lambda row: row[0])
def test_traffic(row: Any) -> None:
    _, function, operands, forward, backward = row

    def run() -> tuple[list[str], list[str]]:
        placement = flow.placement("cpu", [0, 1])
        ours = [
            x(*shape)
            .to_global(placement=placement, sbp=flow.sbp.broadcast)
            .to_global(placement=placement, sbp=s)
            .detach()
            for shape, s in operands
        ]
        with record_collectives() as there:
            out = function(*[t.requires_grad_() for t in ours])
        total = out.sum() if out.ndim else out
        with record_collectives() as back:
            torch.autograd.grad(total, ours)
        return [c.kind for c in there], [c.kind for c in back]

    assert simulate(2, run) == [(forward, backward)] * 2


def test_cross_entropy_traffic() -> None:
    def run(sbp: Any) -> tuple[list[str], list[str]]:
        placement = flow.placement("cpu", [0, 1])
        logits = (
            x(10, 7)
            .to_global(placement=placement, sbp=flow.sbp.broadcast)
            .to_global(placement=placement, sbp=sbp)
            .detach()
            .requires_grad_()
        )
        target = ids(7, 10).to_global(placement=placement, sbp=flow.sbp.broadcast)
        target = target.to_global(placement=placement, sbp=sbp) if sbp.dim == 0 else target
        with record_collectives() as there:
            loss = F.cross_entropy(logits, target)
        with record_collectives() as back:
            torch.autograd.grad(loss, logits)
        return [c.kind for c in there], [c.kind for c in back]

    assert (
        simulate(2, run, flow.sbp.split(0)) == [([ALL], [])] * 2
    )  # the count of targets that are not ignored
    assert (
        simulate(2, run, flow.sbp.split(1)) == [([ALL, ALL], [ALL])] * 2
    )  # the maxima, then the sums with the targets' logits


def test_dropout_in_place() -> None:
    def run() -> bool:
        value = (
            torch.ones(6, 4)
            .to_global(placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.broadcast)
            .to_global(sbp=flow.sbp.split(0))
            .detach()
        )
        out = F.dropout(value, 0.5, inplace=True)
        return (
            out.sbp == value.sbp
            and torch.equal(out.to_local(), value.to_local())
            and set(value.to_local().unique().tolist()) <= {0.0, 2.0}
        )

    assert all(simulate(2, run))


WRONG: list[tuple[Any, ...]] = [
    (lambda v: F.layer_norm(v, (5,)), RuntimeError),
    (lambda v: F.cross_entropy(v, torch.tensor([0, 1, 9])), IndexError),
    (lambda v: F.cross_entropy(v, torch.zeros(3, 5)), (RuntimeError, AssertionError)),
    (lambda v: F.cross_entropy(v, torch.zeros(4, dtype=torch.long)), ValueError),
    (lambda v: v.amax(5), IndexError),
    (lambda v: F.batch_norm(v[:1], None, None, training=True), ValueError),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU gives up every later call of the process")
@pytest.mark.parametrize("row", WRONG, ids=range(len(WRONG)))
def test_what_torch_refuses_is_refused(row: Any) -> None:
    function, error = row

    def run(sbp: Any) -> None:
        value = (
            torch.ones(3, 6)
            .to_global(placement=flow.placement("cpu", [0, 1]), sbp=flow.sbp.broadcast)
            .to_global(sbp=sbp)
        )
        with pytest.raises(error):
            function(value)

    with pytest.raises(error):
        function(torch.ones(3, 6))
    simulate(2, run, flow.sbp.split(1))
    simulate(2, run, flow.sbp.broadcast)


def group_norm_of_one_element_each() -> list[Any]:
    found, where = [], flow.placement.all("cpu")
    for shape in ((2, 4), (3, 2)):
        x: Any = (
            torch.arange(float(shape[0] * shape[1]))
            .view(shape)
            .to_global(where, flow.sbp.broadcast)
        )  # type: ignore[attr-defined]
        for sbp in (flow.sbp.split(0), flow.sbp.split(1), flow.sbp.partial_sum):
            found.append(F.group_norm(x.to_global(sbp=sbp), shape[1]).tolist())
    return found


def test_group_norm_counts_the_elements_of_the_whole() -> None:
    want = [torch.zeros(shape).tolist() for shape in ((2, 4), (3, 2)) for _ in range(3)]
    assert run_on(2, group_norm_of_one_element_each) == [want] * 2
