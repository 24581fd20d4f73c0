"""The limits of the searches: how long they look, and from which size on they look at less.

`LIMITS` has the values in use. Each was chosen by measurement on the models of
benchmarks/auto_search.py. A larger value finds better plans or proves more, and takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "SearchLimits"]


@dataclass(frozen=True)
class SearchLimits:
    """The limits of the searches within a mesh, over meshes, and over stages.

    >>> SearchLimits().solver_seconds, LIMITS == SearchLimits()
    (60.0, True)
    """

    # --- within a mesh (intra_op)
    #: Default time limit of the solver.
    solver_seconds: float = 60.0
    #: Time limit of the search for the minimum memory, where no other is given.
    min_memory_seconds: float = 120.0
    #: Nodes above which a problem counts as large.
    large_problem: int = 1000
    #: Relative gap to the bound at which the solver may stop.
    gap: float = 1e-5
    #: The same gap for the weights of a large problem.
    gap_of_large: float = 2e-3
    #: Maximum number of further solutions where gradient traffic takes longer than the backward
    #: pass that hides it; and the same for a large problem.
    turns: int = 400
    turns_of_large: int = 5
    #: Maximum sum of nodes over these solutions, without a memory limit and with one, where each
    #: solution takes longer.
    turn_nodes: int = 40_000
    turn_nodes_with_memory: int = 6_000

    # --- compared alternatives (`Plan.explain` and the report)
    #: Default time limit for each alternative.
    alternative_seconds: float = 5.0
    #: Relative gap at which the solver may stop for an alternative.
    alternative_gap: float = 1e-3
    #: Alternatives of problems up to so many nodes get further solutions, so many of them.
    alternative_nodes: int = 200
    alternative_turns: int = 40
    #: Relative difference of an alternative's cost that is not worth a report.
    alternative_difference: float = 0.01

    # --- over meshes
    #: Up to so many devices, one mesh is enough.
    one_mesh_devices: int = 2
    #: Up to so many nodes, a problem is solved on every mesh that may be worth it.
    every_mesh_nodes: int = 200
    #: Above so many nodes, a problem is solved on one mesh only.
    one_mesh_nodes: int = 1000
    #: `turns` on meshes other than the first.
    turns_of_other_meshes: int = 40
    #: Fraction of the time for the search over stages, before the one on the mesh that it chose.
    pipeline_fraction: float = 0.6

    # --- over stages (inter_op)
    #: A setting is searched while its bound is below the best plan's cost times this.
    setting_margin: float = 1.02
    #: Prices of memory that layouts are searched for, in seconds of the step for all memory.
    memory_prices: tuple[float, ...] = (0.0, 0.3, 1.0, 4.0, 20.0)
    #: Plans whose step is simulated.
    simulated_plans: int = 8
    #: Prices of memory that are tried before a setting is divided into stages.
    prices_before_division: int = 3
    #: Prices of memory that are tried to raise the final bound.
    prices_for_bound: int = 100
    #: Settings that are tried with all schedules.
    rescheduled_settings: int = 8


#: The limits in use.
LIMITS = SearchLimits()
