"""Tests of torch's first sample of every op, in up to three layouts on two simulated ranks. Results
forward, backward, in-place and with ``out=`` are plain torch's.

`make coverage` runs more samples, more layouts and more ranks, and writes docs/coverage.md.
"""

from __future__ import annotations

import pytest
from support.opinfo import ops, outcomes

PARTS = 72
#: Ops that no distributed tensor can support, and the reason.
REFUSED = {
    "resize_": "a storage of another size",
    "resize_as_": "a storage of another size",
    "sparse.sampled_addmm": "torch has it for sparse matrices on CUDA only",
    "sparse.mm.reduce": "a sparse matrix has no dims to split",
    "to_sparse": "a sparse matrix has no dims to split",
    "jiterator": "compiles code for CUDA",
    "torch.ops.aten._efficient_attention_forward": (
        "leaves the end of its logsumexp unwritten (on a GPU; the CPU has no such kernel)"
    ),
    "_batch_norm_with_update": "a kernel that writes into its arguments, with no function above it",
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(40)
def test_samples(part: int) -> None:
    wrong = []
    for op in ops()[part::PARTS]:
        if op.name.startswith(tuple(REFUSED)):
            continue
        found = list(outcomes(op, ((2,),), samples=1, draws=0))
        wrong += [o for o in found if o.how in ("wrong", "error")]
        for what in {o.what for o in found}:
            mine = [o for o in found if o.what == what]
            wrong += (
                mine[:1]
                if all(o.how == "refused" for o in mine) and what in ("forward", "backward")
                else []
            )
    assert not wrong, "\n".join(map(str, wrong))
