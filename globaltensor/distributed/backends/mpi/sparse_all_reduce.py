"""The sum of sparse tensors, built on an all-gather of indices and values.

`process_group` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import WorldError
from . import collectives
from .progress import Steps
from .reduction import Reduction
from .requests import Team

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(team: Team, tag: int, t: Tensor, fold: Reduction) -> Steps:
    """Reduce a sparse COO tensor over all ranks, in place.

    Raise WorldError for other layouts, and for reductions other than SUM and AVG.
    """
    if t.layout is not torch.sparse_coo or fold.name not in ("SUM", "AVG"):
        raise WorldError(
            f"all_reduce({fold.name}) of a tensor of layout {t.layout}: only SUM and AVG of "
            f"torch.sparse_coo are defined; use to_dense()"
        )
    own_sparse = t.detach().cpu().coalesce()
    indices, values = own_sparse.indices().contiguous(), own_sparse.values().contiguous()
    counts = torch.empty(team.size, dtype=torch.int64)
    yield from collectives.all_gather(
        team, tag, torch.tensor([values.shape[0]]), counts.split_with_sizes([1] * team.size)
    )
    every = [int(n) for n in counts]
    all_indices = [torch.empty(indices.shape[0], n, dtype=indices.dtype) for n in every]
    all_values = [torch.empty(n, *values.shape[1:], dtype=values.dtype) for n in every]
    yield from collectives.all_gather(team, tag, indices, all_indices)
    yield from collectives.all_gather(team, tag, values, all_values)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), t.shape, check_invariants=False
    ).coalesce()
    # The copy is made into ``t`` itself: detach() of a sparse tensor does not share what copy_
    # replaces.
    with torch.no_grad():
        t.copy_(total / team.size if fold.name == "AVG" else total)
