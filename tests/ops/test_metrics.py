"""Tests that values computed by all ranks together are not summed over ranks again: plain running
totals, and metrics of torchmetrics."""

from __future__ import annotations

import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pool import run_on
from torch import Tensor
from torch.utils._pytree import tree_leaves

import globaltensor as flow
from globaltensor.errors import KernelError, ReplicatedError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def laid_out(value: Tensor, sbp: Any) -> Any:
    where = flow.placement.all("cpu")
    return value.to_global(where, B).to_global(sbp=sbp)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------- collectives


def added(total: Tensor, x: Any) -> None:
    total += x


def copied(total: Tensor, x: Any) -> None:
    total.copy_(x)


def listed(total: Tensor, x: Any) -> None:
    torch._foreach_add_([total], [x])


WRITES = (added, copied, listed)
ADDS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_reduce of flow": flow.distributed.all_reduce,
    "all_reduce by position": lambda t: dist.all_reduce(t, dist.ReduceOp.PRODUCT, None, False),
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([torch.empty_like(t) for _ in range(2)], t),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(torch.empty(8), t),
    "gather": lambda t: dist.gather(
        t, [torch.empty_like(t) for _ in range(2)] if dist.get_rank() == 0 else None
    ),
    "reduce_scatter": lambda t: dist.reduce_scatter(torch.empty(4), [t, t]),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(torch.empty(2), t),
}
#: Names that are newer than torch 2.11.
NEWER: dict[str, Callable[[Tensor], Any]] = {
    "all_gather_single": lambda t: dist.all_gather_single(torch.empty(8), t),
    "reduce_scatter_single": lambda t: dist.reduce_scatter_single(torch.empty(2), t),
    "gather_into_tensor": lambda t: dist.gather_into_tensor(t, torch.empty(8)),
    "gather_single": lambda t: dist.gather_single(t, torch.empty(8)),
}
ADDS |= {name: add for name, add in NEWER.items() if hasattr(dist, name)}


def running_totals() -> list[str]:
    """Return the cases in which a collective that would count values twice is accepted."""
    found = []
    for sbp in (B, S(0), P):
        for write in WRITES:
            for name, add in ADDS.items():
                total = torch.zeros(4)
                write(total, laid_out(torch.arange(4.0), sbp))
                try:
                    add(total)
                    found.append(f"{name} after {write.__name__} of {sbp}")
                except ReplicatedError as error:
                    if not re.search(
                        r"shape \[4\].*over 2 ranks would count it 2 "
                        r"times.*sync_on_compute=False.*clone",
                        str(error),
                    ):
                        found.append(str(error))
                assert total.tolist() == [0, 1, 2, 3], "nothing was sent"
    return found


def test_a_total_of_all_ranks_is_not_added_up_over_ranks() -> None:
    assert run_on(2, running_totals) == [[], []]


def harmless() -> None:
    ones = laid_out(torch.ones(4), S(0))

    def total() -> Tensor:
        out = torch.zeros(4)
        out += ones
        return out

    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        dist.all_reduce(t := total(), op)
        assert t.tolist() == [1] * 4
    dist.broadcast(total(), 0)
    dist.all_reduce(t := total().clone())  # a clone shows that the user wants the sum
    assert t.tolist() == [2] * 4
    (t := total()).add_(float(dist.get_rank()))  # from here on the value is this rank's own
    dist.all_reduce(t)
    assert t.tolist() == [3] * 4
    with torch.inference_mode():  # inference tensors have no versions
        dist.all_reduce(t := total())
    alone = torch.zeros(4)
    alone += torch.ones(4)
    dist.all_reduce(alone)
    assert alone.tolist() == [2] * 4


def test_what_is_meant_passes() -> None:
    run_on(2, harmless)


def of_global_tensors() -> None:
    g = laid_out(torch.arange(4.0), S(0))
    for add in (
        dist.all_reduce,
        lambda t: dist.all_gather([torch.empty(4)] * 2, t),
        lambda t: dist.broadcast(t, 0),
    ):
        with pytest.raises(
            KernelError,
            match=r"one value on all ranks already.*to_global\(sbp=flow.sbp.broadcast\)",
        ):
            add(g)


def test_collectives_of_global_tensors_say_that_there_is_nothing_to_add_up() -> None:
    run_on(2, of_global_tensors)


# ------------------------------------------------------------------------------------- torchmetrics


def metrics() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    import torchmetrics as tm
    from torchmetrics import classification as tc

    draw = torch.Generator().manual_seed(0)
    logits, target = torch.randn(11, 3, generator=draw), torch.randint(0, 3, (11,), generator=draw)
    x, y = torch.rand(11, generator=draw), torch.rand(11, generator=draw)
    return {
        "a state that is written in place": (
            lambda: tc.MulticlassConfusionMatrix(3),
            (logits, target),
        ),
        "one that is made anew": (lambda: tc.MulticlassAccuracy(3), (logits, target)),
        "beside one that counts plain numbers": (lambda: tm.MeanSquaredError(), (x, y)),
        "lists": (lambda: tc.BinaryAUROC(), (x, (y > 0.5).long())),
        "no reduction of its own": (lambda: tm.PearsonCorrCoef(), (x, y)),
        "a mean": (lambda: tm.MeanMetric(), (x,)),
        "a sum": (lambda: tm.SumMetric(), (x,)),
        "a maximum": (lambda: tm.MaxMetric(), (x,)),
        "several": (
            lambda: tm.MetricCollection([tm.MeanSquaredError(), tm.MeanAbsoluteError()]),
            (x, y),
        ),
        "one in another": (lambda: tm.MinMaxMetric(tm.MeanSquaredError()), (x, y)),
    }


def _updated(metric: Any, given: Any) -> Any:
    metric.update(*given)
    return metric.compute()


def _called(metric: Any, given: Any) -> Any:
    return metric(*given), metric.compute()


def _often(metric: Any, given: Any) -> Any:
    metric(*given), metric.update(*given), metric(*given)
    first = metric.compute()
    metric.reset()
    return first, _updated(metric, given)


def _pickled(metric: Any, given: Any) -> Any:
    return _updated(pickle.loads(pickle.dumps(metric)), given)


def _numbers(result: Any) -> Tensor:
    return torch.cat(
        [
            torch.as_tensor(t.numpy() if getattr(t, "is_global", False) else t).double().flatten()
            for t in tree_leaves(result)
        ]
    )


def nowhere() -> bool:
    return False


#: Each part has every seventh pair of a metric and a use. The first one has six of the ten metrics
#: and every use.
PARTS = 7


def fed_global_tensors(part: int) -> list[str]:
    """Return the metrics of global tensors that differ from those of the full batch on one
    device."""
    from torchmetrics import Metric

    pairs = itertools.product(metrics().items(), (_updated, _called, _often, _pickled))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (name, (make, given)), use in itertools.islice(pairs, part, None, PARTS):
            alone = make()
            for m in alone.modules():
                if isinstance(m, Metric):
                    m.distributed_available_fn = nowhere
            want = _numbers(use(alone, given))
            for sbp in (B, S(0)):
                got = _numbers(use(make(), [laid_out(t, sbp) for t in given]))
                if not torch.allclose(got, want, rtol=1e-5):
                    found.append(
                        f"{name}, {use.__name__}, {sbp}: {got.tolist()} instead of {want.tolist()}"
                    )
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_metrics_that_are_fed_global_tensors_are_those_of_the_whole_batch(part: int) -> None:
    assert run_on(2, fed_global_tensors, part) == [[], []]


def laid_out_otherwise() -> list[str]:
    """Return the layouts in which a confusion matrix of global tensors isn't that of the full batch
    on one device, with logits split by classes or shown as sums, and with images of classes."""
    from torchmetrics import classification as tc

    draw = torch.Generator().manual_seed(0)
    scores, classes = torch.randn(11, 3, generator=draw), torch.randint(0, 3, (11,), generator=draw)
    images, masks = (
        torch.randn(4, 3, 5, generator=draw),
        torch.randint(0, 3, (4, 5), generator=draw),
    )
    wheres = {(B,): flow.placement.all("cpu"), (B, B): flow.placement("cpu", [[0], [1]])}
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given, dims in (((scores, classes), (2, 1)), ((images, masks), (3, 2))):
            alone = tc.MulticlassConfusionMatrix(3)
            alone.distributed_available_fn = nowhere
            want = _numbers(_called(alone, given))
            layouts: list[list[tuple[Any, ...]]] = [
                [(B,), (P,), *((S(d),) for d in range(n))] for n in dims
            ]
            pairs = list(itertools.product(*layouts))
            pairs += [((S(0), B), (S(0), B)), ((B, S(1)), (S(0), B)), ((S(1), P), (P, B))]
            for pair in pairs:
                ours = [
                    t.to_global(wheres[(B,) * len(sbp)], [B] * len(sbp)).to_global(sbp=sbp)  # type: ignore[attr-defined]
                    for t, sbp in zip(given, pair, strict=True)
                ]
                got = _numbers(_called(tc.MulticlassConfusionMatrix(3), ours))
                if not torch.equal(got, want):
                    found.append(f"{pair}: {got.tolist()} instead of {want.tolist()}")
    return found


def test_a_confusion_matrix_is_that_of_the_whole_batch_in_every_layout() -> None:
    assert run_on(2, laid_out_otherwise) == [[], []]


def fed_own_rows() -> None:
    rank = flow.env.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make, given in metrics().values():
            metric, alone = make(), make()
            want = _numbers(_updated(alone, [laid_out(t, S(0)) for t in given]))
            assert torch.allclose(
                _numbers(_updated(metric, [t[:6] if rank == 0 else t[6:] for t in given])),
                want,
                rtol=1e-5,
            )


def test_metrics_that_are_fed_each_ranks_own_rows_are_added_up_as_ever() -> None:
    run_on(2, fed_own_rows)
