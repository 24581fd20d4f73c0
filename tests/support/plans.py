"""Plans made by hand, in the form of a search's plans, with figures that are easy to add up."""

from __future__ import annotations

import dataclasses
import math

from globaltensor.auto.plan.plan import (
    Alternative,
    LayoutChange,
    OtherChoice,
    PlacedTensor,
    Plan,
    PlannedCall,
)

__all__ = ["layered", "pipelined"]


def layered(layers: int, prefix: str = "blocks") -> Plan:
    """Return a plan for a stack of equal layers: norm, up, down and an addition each. On the second
    axis, up is split by columns and down by rows."""
    given = [PlacedTensor("input_0", "input", (8, 16), "float32", ("S(0)", "B"), 256)]
    calls: list[PlannedCall] = []
    changes: list[LayoutChange] = []
    x = "input_0"

    def call(
        name: str,
        function: str,
        module: str,
        operands: tuple[str, ...],
        wanted: tuple[tuple[str, str], ...],
        result: tuple[str, str],
    ) -> str:
        shape = (8, 64) if module.endswith("up") else (8, 16)
        others = (
            OtherChoice(
                wanted,
                (("S(0)", "B"),),
                2e-3,
                1024,
                f"all_gather of {name} (4.0 KiB, S(0) S(1) -> S(0) B)",
            ),
            OtherChoice(wanted, (("B", "B"),), 0.0, 0, ""),
        )
        times = (1e-3, 2e-3) if function == "linear" else (1e-4, 2e-4)
        calls.append(
            PlannedCall(
                name,
                function,
                module,
                "model.py:7",
                operands,
                wanted,
                (result,),
                (shape,),
                *times,
                0.0,
                0.125,
                others,
                512,
                len(calls),
            )
        )
        return name

    for i in range(layers):
        path = f"{prefix}.{i}"
        given += [
            PlacedTensor(f"{path}.norm.weight", "parameter", (16,), "float32", ("B", "B"), 64)
        ]
        given += [
            PlacedTensor(
                f"{path}.up.weight",
                "parameter",
                (64, 16),
                "float32",
                ("B", "S(0)"),
                1024,
                (OtherChoice((), (("B", "B"),), 1e-3, 3072, ""),),
            )
        ]
        given += [
            PlacedTensor(
                f"{path}.down.weight", "parameter", (16, 64), "float32", ("B", "S(1)"), 1024
            )
        ]
        normed = call(
            f"layer_norm_{i}",
            "layer_norm",
            f"{path}.norm",
            (x, f"{path}.norm.weight"),
            (("S(0)", "B"), ("B", "B")),
            ("S(0)", "B"),
        )
        up = call(
            f"linear_{2 * i}",
            "linear",
            f"{path}.up",
            (normed, f"{path}.up.weight"),
            (("S(0)", "B"), ("B", "S(0)")),
            ("S(0)", "S(1)"),
        )
        down = call(
            f"linear_{2 * i + 1}",
            "linear",
            f"{path}.down",
            (up, f"{path}.down.weight"),
            (("S(0)", "S(1)"), ("B", "S(1)")),
            ("S(0)", "P"),
        )
        x = call(f"add_{i}", "add", path, (x, down), (("S(0)", "B"), ("S(0)", "B")), ("S(0)", "B"))
        changes += [
            LayoutChange(down, x, ("S(0)", "P"), ("S(0)", "B"), 5e-4, 0.0, 512, "all_reduce", "")
        ]
        changes += [
            LayoutChange(
                f"{path}.up.weight",
                up,
                ("B", "S(0)"),
                ("B", "S(0)"),
                0.0,
                1e-4,
                4096,
                "",
                "all_reduce",
            )
        ]
    call("mse_loss", "mse_loss", "", (x,), (("S(0)", "B"),), ("P", "B"))
    end = 2 * len(calls)
    levels = [(t, 10_000 * layers + 512 * min(t, end - t)) for t in range(end)]
    memory = max(level for _, level in levels)
    spent = {
        "computing": sum(c.forward + c.backward for c in calls),
        "moving": sum(c.forward + c.backward for c in changes), "hidden": 5e-5 * layers,
        "updating": 1e-4,
    }  # fmt: skip
    cost = spent["computing"] + spent["moving"] - spent["hidden"] + spent["updating"]
    parameters = sum(g.bytes for g in given if g.kind == "parameter")
    held = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "inputs and buffers": 256,
    }
    alternatives = {
        "data parallel": Alternative(1.25 * cost, 3 * memory, True),
        "fully sharded (ZeRO-3)": Alternative(
            0.9 * cost, 4 * memory, False, "needs more than there is"
        ),
        "pipeline": Alternative(
            math.inf, 0, False, "input_0 [8, 16] has fewer rows than there are ranks"
        ),
    }
    return Plan(
        "dgx-h100", (2, 4), cost, 0.9 * cost, cost, memory, 2 * memory, True, tuple(given),
        tuple(calls), tuple(changes), alternatives, tuple(levels),
        {"micro_batches": 4, "schedule": "1f1b"},
        {"solving_seconds": 0.25, "nodes": 99, "log": {"width": 2}}, spent, moments=end,
        memory_breakdown={**held, "activations": memory - sum(held.values())},
    )  # fmt: skip


def pipelined(layers: int) -> Plan:
    """Return the same plan in two stages, in the form of a search over meshes and stages. Such
    plans have no prices of alternatives and no memory over time."""
    plan = layered(layers)
    half = layers // 2
    stages = [
        {
            "lane": k, "ranks": [4 * k, 4 * k + 4], "mesh": [2, 2],
            "segments": [f"blocks.{i}" for i in range(k * half, (k + 1) * half)],
            "recompute": ["blocks.0"] if k == 0 else [], "memory": 20_000 - 1000 * k,
        }
        for k in range(2)
    ]  # fmt: skip
    zero = {f"blocks.{i}.up.weight": {"stage": 3, "shares": ["S(0)", "B"]} for i in range(layers)}
    choices = {
        "mesh": [2, 2],
        "stages": stages,
        "micro_batches": 8,
        "schedule": "1f1b",
        "recompute": ["blocks.0"],
        "zero": zero,
        "batch": 64,
    }
    kept = dataclasses.replace(plan.changes[0], taker="")  # as the value that leaves a stage
    return dataclasses.replace(
        plan, choices=choices, over_time=(), moments=0, changes=(*plan.changes, kept),
        memory_breakdown={"parameters": 9000, "peak": 20_000},
        calls=tuple(dataclasses.replace(c, others=()) for c in plan.calls),
        placed=tuple(dataclasses.replace(g, others=()) for g in plan.placed),
        cost_breakdown={
            "computing and moving": 0.02,
            "parameters and gradients": 0.004,
            "hidden": 0.002,
        },
    )  # fmt: skip
