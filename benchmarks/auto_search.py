"""Time the full search for 512 devices, and the search for layouts alone on one mesh of 8 x 8.

The full search is `flow.auto.plan`. It chooses mesh, stages, micro-batches, recomputation, ZeRO and
layouts, and its time includes captures. The cluster is a preset and nothing runs on it: the time is
that of one core of this machine. The models are from transformers, on the meta device.

Where against.py starts it, a quick pair of searches is timed in turn instead, by public names only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import Row, interleave, keep, options, show, table
from torch import Tensor, nn
from turns import turns

import globaltensor as flow
from globaltensor.cluster import Cluster

DEVICES, SIDE = 512, 8


class Words(nn.Module):
    """A language model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]


class Pictures(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixels).logits, labels)


def ids(rows: int, words: int) -> Tensor:
    return torch.empty(rows, words, dtype=torch.long)


def gpt(hf: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.GPT2Config(
        n_embd=12288,
        n_layer=96,
        n_head=96,
        n_positions=2048,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    return Words(hf.GPT2LMHeadModel(config)), (ids(1024, 2048),) * 2


def mixtral(hf: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.MixtralConfig(use_cache=False)  # by default the 8x7B: 32 layers, width 4096
    return Words(hf.MixtralForCausalLM(config)), (ids(1024, 1024),) * 2


def t5(hf: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = hf.T5Config(
        d_model=1024,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return Words(hf.T5ForConditionalGeneration(config)), (ids(1024, 512), ids(1024, 128))


def resnet(hf: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Pictures(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000))), (
        torch.empty(4096, 3, 224, 224),
        torch.empty(4096, dtype=torch.long),
    )


MODELS: dict[str, Callable[[Any], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "GPT, 96 layers, width 12288, 2048 words": gpt,
    "Mixtral 8x7B, 1024 words": mixtral,
    "T5, 24 + 24 layers, width 1024, 512 and 128 words": t5,
    "ResNet-50, 224 x 224": resnet,
}


def bare(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model in bfloat16 and its inputs, both on the meta device."""
    import transformers as hf

    with torch.device("meta"):
        model, inputs = MODELS[name](hf)
    return model.to(torch.bfloat16), tuple(
        t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs
    )


def searched(name: str, devices: int) -> dict[str, Any]:
    """Run the full search on ``devices`` devices, and return the row of the table."""
    model, inputs = bare(name)
    cluster = Cluster.preset("dgx-h100", nodes=devices // 8).with_size(devices)
    started, spent = time.perf_counter(), time.process_time()
    plan = flow.auto.plan(model, inputs, cluster)
    took, spent = time.perf_counter() - started, time.process_time() - spent
    chosen = plan.choices
    return {
        "case": f"{name}, {devices} devices, batch {len(inputs[0])}", "unit": "s",
        "whole": round(took, 1), "processor": round(spent, 1),
        "search": round(plan.search["searching_seconds"], 1),
        "settings": f"{plan.search['searched']} of {plan.search['settings']}",
        "cost": float(f"{plan.cost:.4g}"), "bound": float(f"{plan.bound:.4g}"),
        "gap": f"{plan.gap:.1%}", "stages": len(chosen["stages"]),
        "mesh": " x ".join(map(str, chosen["mesh"])), "micro-batches": chosen["micro_batches"],
        "schedule": chosen["schedule"] or "",
        "recomputed": len(chosen["recompute"]), "memory": f"{plan.memory / 2**30:.1f} GiB",
        "others": "; ".join(f"{k} {a.cost:.3g}{'' if a.fits else ' (does not fit)'}" for k,
            a in plan.alternatives.items()),
    }  # fmt: skip


def laid(name: str, side: int) -> dict[str, Any]:
    """Search for layouts alone on a mesh of side x side, and return the row of the table.

    There is no memory limit, and the capture is not timed. The time "search" covers candidates,
    prices and the proof. The time "whole" also covers the plan's report."""
    from globaltensor.auto.intra_op.search import search
    from globaltensor.auto.intra_op.search_options import Options
    from globaltensor.auto.ir.trace import calls_of_model
    from globaltensor.sharding.placement import Placement

    model, (one, *more) = bare(name)
    few = tuple(t[:64] for t in (one, *more))
    cluster = Cluster.preset("dgx-h100", nodes=max(1, side**2 // 8)).with_size(side**2)
    calls, mesh = (
        calls_of_model(model, few),
        Placement("cpu", np.arange(side**2).reshape(side, side)),
    )
    started = time.perf_counter()
    plan = search(calls, cluster, mesh, Options(), compared=False).plan
    return {
        "case": f"{name}, layouts on {side} x {side}, batch {len(few[0])}", "unit": "s",
        "whole": round(time.perf_counter() - started, 2),
        "search": round(plan.search["formulating_seconds"] + plan.search["solving_seconds"], 2),
        "of it solving": round(plan.search["solving_seconds"], 2),
        "cost": float(f"{plan.cost:.4g}"), "bound": float(f"{plan.bound:.4g}"),
        "gap": f"{plan.gap:.1%}", "mesh": f"{side} x {side}",
        "memory": f"{plan.memory / 2**30:.1f} GiB",
    }  # fmt: skip


def in_turn(name: str, rounds: int) -> Row:
    """Time the search for layouts on 2 x 2 devices and the full one for 16, round by round.

    The model must fit on 4 devices. Captures count."""
    model, (one, *more) = bare(name)
    few = tuple(t[:64] for t in (one, *more))
    small, large = (Cluster.preset("dgx-h100", nodes=n).with_size(s) for n, s in ((1, 4), (2, 16)))
    contenders: dict[str, Callable[[], object]] = {
        "layouts": lambda: flow.auto.plan(model, few, small, mesh=(2, 2)),
        "whole": lambda: flow.auto.plan(model, (one, *more), large),
    }
    return Row(
        name,
        interleave(contenders, rounds, calls=1, warm_up=1, clock=time.process_time),
        unit="ms",
    )


def main() -> None:
    more = {"--save": {"action": "store_true", "help": "write the rows into results/"}}
    chosen = options(__doc__.splitlines()[0], steps=0, more=more)
    torch.set_num_threads(1)
    if (pair := turns()) is not None:
        fitting = [name for name in list(MODELS)[2:] if chosen.only in name]
        show([in_turn(name, pair.rounds) for name in fitting], chosen.json, "layouts")
        return
    rows = []
    for name in list(MODELS)[2:3] if chosen.quick else MODELS:
        if chosen.only in name:
            for row in (
                laid(name, 2 if chosen.quick else SIDE),
                searched(name, 16 if chosen.quick else DEVICES),
            ):
                rows.append(row)
                if chosen.json:
                    print(json.dumps(row), flush=True)
    if not chosen.json:
        print(table(rows))
    if chosen.save:
        keep(rows, "auto_search")


if __name__ == "__main__":
    main()
