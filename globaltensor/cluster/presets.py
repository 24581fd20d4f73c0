"""Presets of known machines, to plan for a machine that is not at hand.

`Cluster.preset` reads them. Each number has its source. None replaces `globaltensor profile` on the
machine itself.

Peak rates are those that large matmuls and copies reach, not the data sheets'. They are 70 % of the
data sheets' where nothing was measured, as AutoParallel (meta-pytorch) assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from .frozen_dict import Frozen
from .measured_curves import Curve
from .model import Cluster

__all__ = ["PRESETS", "preset"]

_GIB: Final = 1 << 30
_SIZES: Final = tuple(1 << k for k in range(10, 33, 2))


def _alpha_beta_curves(kind: str, table: Mapping[int, tuple[float, float]]) -> list[Curve]:
    """Return the curves of one node by latency (us) and bandwidth (GB/s), given by ranks.

    Bandwidth counts bytes as `seconds` does.
    """
    return [
        Curve(kind, p, 1, tuple((n, us * 1e-6 + n / (rate * 1e9)) for n in _SIZES))
        for p, (us, rate) in table.items()
    ]


# Eight GPUs on NVSwitch. AutoParallel fitted this table to NCCL on H100. It has latencies and
# algorithm bandwidths of all-gather and reduce-scatter, of all-reduce, and of all-to-all (380 GB/s
# at 8). The all-reduce among 8 uses NVLS. NVIDIA reports ~480 GB/s bus bandwidth there, and 475
# were measured on H200 (nccl-tests issues 212, 272).
_GATHERS: Final = {2: (8, 537), 4: (17, 434), 8: (30, 394)}
_NVSWITCH_H100: Final = (
    *_alpha_beta_curves("all_gather", _GATHERS),
    *_alpha_beta_curves("reduce_scatter", _GATHERS),
    *_alpha_beta_curves("all_reduce", {2: (10, 324), 4: (15, 236), 8: (31, 267)}),
    *_alpha_beta_curves("all_to_all", {8: (50, 380)}),
)

_NVLINK_H100: Final[dict[str, Any]] = {
    "device": "cuda",
    "node_size": 8,
    "launch": 2e-6,
    "latency": 8e-6,  # of a tree's step: 8, 17, 30 us for 2, 4, 8 ranks (the same table)
    # bus bandwidth of all-gather among 8; the link has 450 (nccl-tests issue 212)
    "bandwidth": 345e9,
    "tree": True,
    # Eight 400 Gb/s adapters, one for each GPU: 50 GB/s on the link. 32 nodes gather 2 GB at ~340
    # GB/s a node (nccl issue 1218).
    "node_bandwidth": 42e9,
    "node_latency": 14e-6,  # torch's estimate of NCCL's Simple protocol between nodes
    "message": 1e-6,  # all-to-all of 2 to 32 nodes: 37 to 290 us (AutoParallel)
    "memory_latency": 4e-6,
    "kernel": 5e-6,
    "overlap": 1.15,  # Galvatron measures 1.1 to 1.3
    "measured": _NVSWITCH_H100,
}


def _dgx_h100(**more: Any) -> Cluster:
    # NVIDIA H100 SXM data sheet: bf16 989, tf32 495, fp64 67 TFLOP/s dense; fp32 without tensor
    # cores 67; 3.35 TB/s; 80 GB.
    flops = {"bfloat16": 692e12, "float16": 692e12, "float32": 47e12, "float64": 47e12}
    return Cluster(
        **_NVLINK_H100
        | {
            "flops": flops,
            "saturation": _TENSOR_CORES,
            "memory_bandwidth": 2.35e12,
            "memory": 79 * _GIB,
            "size": 8,
        }
        | more
    )


def _dgx_h200(**more: Any) -> Cluster:
    # H100's figures with 4.8 TB/s and 141 GB (NVIDIA H200 data sheet).
    return _dgx_h100(**{"memory_bandwidth": 3.36e12, "memory": 139 * _GIB} | more)


def _dgx_a100(**more: Any) -> Cluster:
    # NVIDIA A100 SXM data sheet: bf16 312, fp32 19.5, fp64 19.5 (tensor cores) TFLOP/s; 2.0 TB/s;
    # 80 GB. NVLink 3: 300 GB/s each way, 12 links, each of which counts 20 GB/s in NCCL's model.
    # Eight 200 Gb/s adapters. Three nodes with 4 HDR each reach 96 GB/s (nccl-tests issue 119).
    constants: dict[str, Any] = {
        "device": "cuda",
        "node_size": 8,
        "size": 8,
        "launch": 6.6e-6,  # NCCL's base latency, and its latency of a step, in torch's estimates
        "latency": 6e-6,
        "bandwidth": 230e9,
        "tree": True,
        "node_bandwidth": 22e9,
        "node_latency": 14e-6,
        "message": 1e-6,
        "memory_latency": 4e-6,
        "memory_bandwidth": 1.4e12,
        "kernel": 5e-6,
        "flops": {"bfloat16": 218e12, "float16": 218e12, "float32": 13.6e12, "float64": 13.6e12},
        "saturation": _TENSOR_CORES_A100,
        "overlap": 1.15,
        "memory": 79 * _GIB,
    }
    return Cluster(**constants | more)


def _pcie_a100(**more: Any) -> Cluster:
    # A100 PCIe (data sheet: 300 W, 1.94 TB/s). All eight through host bridges: 14 GB/s a pair with
    # 19-23 us (ColossalAI's alpha_beta_profiler). One 200 Gb/s adapter serves all. UCL notes 14-15
    # times less than NVLink.
    pcie = {
        "bandwidth": 14e9,
        "latency": 10e-6,
        "launch": 10e-6,
        "node_bandwidth": 22e9 / 8,
        "node_stream": 13e9,
        "memory_bandwidth": 1.35e12,
    }
    return _dgx_a100(**pcie | {"tree": False, "node_latency": 20e-6} | more)


def _pcie_gen5(**more: Any) -> Cluster:
    # GPUs on PCIe Gen5 x16: 53-56 GB/s between two of one NUMA node, 39-51 across NUMA nodes (RTX
    # PRO 6000). Arithmetic as on H100 PCIe: 756 bf16, 51 fp32, 2.0 TB/s.
    pcie: dict[str, Any] = {
        "bandwidth": 39e9,
        "latency": 10e-6,
        "launch": 10e-6,
        "tree": False,
        "node_bandwidth": 42e9 / 8,
        "node_stream": 39e9,
    }
    flops = {"bfloat16": 529e12, "float16": 529e12, "float32": 36e12, "float64": 36e12}
    return _dgx_h100(
        **pcie
        | {"node_latency": 20e-6, "flops": flops, "memory_bandwidth": 1.4e12, "measured": ()}
        | more
    )


# A cube-shaped matmul reaches about half the rate at side 1024 on H100's tensor cores, and at side
# 700 on A100's.
_TENSOR_CORES: Final = Frozen(
    {
        "bfloat16": 2.0 * 1024**3,
        "float16": 2.0 * 1024**3,
        "float32": 2.0 * 384**3,
        "float64": 2.0 * 384**3,
    }
)
_TENSOR_CORES_A100: Final = Frozen(
    {
        "bfloat16": 2.0 * 700**3,
        "float16": 2.0 * 700**3,
        "float32": 2.0 * 256**3,
        "float64": 2.0 * 256**3,
    }
)


def _cpu(**more: Any) -> Cluster:
    # Ranks of one thread on one host, over gloo. Measured on two cores of a small server, between
    # two ranks: an all-reduce of 4 KB takes 1.2 ms, one of 105 MB 62 ms. Computing and moving share
    # the cores.
    constants: dict[str, Any] = {
        "device": "cpu",
        "size": 2,
        "launch": 3e-4,
        "latency": 3e-4,
        "bandwidth": 1.7e9,
        "memory_latency": 2e-6,
        "memory_bandwidth": 8e9,
        "kernel": 4e-6,
        "flops": {"float64": 30e9, "float32": 60e9, "bfloat16": 60e9, "float16": 15e9},
        "saturation": {
            "float64": 2.0 * 24**3,
            "float32": 2.0 * 32**3,
            "bfloat16": 2.0 * 48**3,
            "float16": 2.0 * 32**3,
        },
        "overlap": 1.6,
    }
    return Cluster(**constants | more)


def _ethernet(rate: float, **more: Any) -> Cluster:
    # Gloo between hosts: 0.11 GB/s over 1 GbE (gloo issue 21). Two ranks reach ~1.1 GB/s over 40
    # GbE (gloo issue 248), which is no more than 10 GbE carries.
    wire = {"node_size": 1, "node_latency": 5e-4, "node_bandwidth": rate, "overlap": 1.3}
    return _cpu(**wire | more)


PRESETS: Final[dict[str, tuple[str, Callable[..., Cluster]]]] = {
    "generic": (
        "the default machine that plans are made for: all links are equally fast",
        Cluster,
    ),
    "dgx-a100": ("8 x A100 SXM 80 GB on NVSwitch, a 200 Gb/s adapter each", _dgx_a100),
    "dgx-h100": ("8 x H100 SXM 80 GB on NVSwitch, a 400 Gb/s adapter each", _dgx_h100),
    "dgx-h200": ("8 x H200 SXM 141 GB on NVSwitch, a 400 Gb/s adapter each", _dgx_h200),
    "pcie-a100": ("8 x A100 PCIe 80 GB through the host, one 200 Gb/s adapter for all", _pcie_a100),
    "pcie-gen5": ("8 x H100 PCIe on Gen5 x16, one 400 Gb/s adapter for all", _pcie_gen5),
    "cpu": ("2 ranks of one thread on one host, over gloo", _cpu),
    "ethernet-1g": (
        "hosts with one such rank each, over gloo on 1 GbE",
        lambda **more: _ethernet(0.11e9, **more),
    ),
    "ethernet-10g": ("the same on 10 GbE", lambda **more: _ethernet(1.0e9, **more)),
    "ethernet-40g": (
        "the same on 40 GbE, of which gloo uses a quarter",
        lambda **more: _ethernet(1.1e9, **more),
    ),
}


def preset(name: str, nodes: int = 1, **changes: object) -> Cluster:
    """Return the cluster of a preset: see `Cluster.preset`."""
    if name not in PRESETS:
        raise ValueError(f"no preset is named {name!r}; there are {', '.join(PRESETS)}")
    if nodes < 1:
        raise ValueError(f"nodes={nodes}: there must be at least one")
    cluster = PRESETS[name][1](name=name)
    if cluster.node_size:
        cluster = replace(cluster, size=nodes * cluster.node_size)
    elif nodes > 1:
        raise ValueError(
            f"the preset {name!r} has no links between nodes: nodes={nodes} is not possible; "
            f"size= says how many devices there are"
        )
    if name != "generic":
        cluster = replace(
            cluster, source="a preset, from data sheets and what others have measured"
        )
    others = sorted(changes.keys() - {"size", "name", "memory", "source"})
    if others:
        cluster = replace(
            cluster, source=f"{cluster.source or 'a preset'}; {', '.join(others)} as given"
        )
    return replace(cluster, **changes)  # type: ignore[arg-type]
