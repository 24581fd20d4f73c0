"""Tests of torch's flex_attention on global tensors: functions of batch entry and head count them
as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bodies import values
from support.everywhere import full
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import KernelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]
B, S = flow.sbp.broadcast, flow.sbp.split
GRID = flow.placement("cpu", [[0, 1], [2, 3]])
LAYOUTS = ([S(0), S(1)], [S(1), S(1)], [S(2), S(0)])
Q, K, V = values(2, 4, 6, 8), values(2, 2, 6, 8, seed=1), values(2, 2, 6, 8, seed=2)


def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + (q - k) * (h + 1) + b * (q % 3)


def same(wanted: Any, layouts: Any, **options: Any) -> None:
    def on_ranks() -> None:
        for layout in layouts:
            parts: Any = [t.to_global(GRID, [B, B]).to_global(sbp=layout) for t in (Q, K, V)]  # type: ignore[attr-defined]
            got = flex_attention(*parts, enable_gqa=True, **options)
            for mine, one in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
                torch.testing.assert_close(
                    full(mine), one, msg=lambda text, layout=layout: f"{layout}: {text}"
                )

    simulate(4, on_ranks, timeout=120.0)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.sweep(4)
def test_scores_see_their_batch_entry_and_head(layout: Any) -> None:
    same(
        flex_attention(Q, K, V, score, enable_gqa=True, return_lse=True),
        [layout],
        score_mod=score,
        return_lse=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.sweep(3)
def test_block_masks_are_cut_with_the_heads(layout: Any) -> None:
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & ((q + k + b + h) % 5 != 4),
        2,
        4,
        6,
        6,
        device="cpu",
        BLOCK_SIZE=4,
    )
    same((flex_attention(Q, K, V, block_mask=mask, enable_gqa=True),), [layout], block_mask=mask)


def test_the_function_taken_before_says_so() -> None:
    here = flow.placement("cpu", [0])
    q: Any = Q.to_global(here, B)  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match="imported before globaltensor"):
        flex_attention.__wrapped__(q, q, q)  # type: ignore[attr-defined]
