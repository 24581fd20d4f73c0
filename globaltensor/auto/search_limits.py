"""The limits of the searches: time limits, and sizes above which a search tries fewer plans.

`LIMITS` has the values in use. Each was chosen by measurement on the models of
benchmarks/auto_search.py. With a larger value, a search finds better plans or proves a better
bound, and takes longer.
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
    #: The default time limit of the solver.
    solver_seconds: float = 60.0
    #: The default time limit of the search for the minimum memory.
    min_memory_seconds: float = 120.0
    #: A problem with more nodes than this is large.
    large_problem: int = 1000
    #: The solver may stop at this gap to the bound, relative to the cost.
    gap: float = 1e-5
    #: The same gap for a large problem.
    gap_of_large: float = 2e-3
    #: A problem is solved again if gradient traffic takes longer than the backward pass that hides
    #: it. This is the maximum number of such solutions.
    turns: int = 400
    #: The same maximum for a large problem.
    turns_of_large: int = 5
    #: The maximum sum of nodes over these solutions.
    turn_nodes: int = 40_000
    #: The same maximum with a memory limit, with which each solution takes longer.
    turn_nodes_with_memory: int = 6_000

    # --- compared alternatives (`Plan.explain` and the report)
    #: The default time limit of each alternative.
    alternative_seconds: float = 5.0
    #: The solver may stop at this relative gap for an alternative.
    alternative_gap: float = 1e-3
    #: `turns` for an alternative of a problem that has at most `alternative_nodes` nodes. An
    #: alternative of a larger problem is solved once.
    alternative_turns: int = 40
    alternative_nodes: int = 200
    #: An alternative whose relative gap is above this is reported with "at most".
    alternative_difference: float = 0.01

    # --- over meshes
    #: On at most this many devices, only the mesh of one axis is searched.
    one_mesh_devices: int = 2
    #: A problem of at most this many nodes is solved on each mesh whose time of computing is below
    #: the cost of the best plan. For a larger problem, the bound of the search over stages decides.
    every_mesh_nodes: int = 200
    #: A problem of more nodes than this is solved on one mesh only.
    one_mesh_nodes: int = 1000
    #: `turns` on meshes other than the first.
    turns_of_other_meshes: int = 40
    #: The fraction of the time that the search over stages gets. The search on the mesh that it
    #: has chosen gets the rest.
    pipeline_fraction: float = 0.6

    # --- over stages (inter_op)
    #: A setting is searched if its bound is below this times the cost of the best plan.
    setting_margin: float = 1.02
    #: Layouts are searched at each of these prices of memory. A price is the cost of as much memory
    #: as the limit, as a multiple of the step time.
    memory_prices: tuple[float, ...] = (0.0, 0.3, 1.0, 4.0, 20.0)
    #: The maximum number of plans whose step is simulated.
    simulated_plans: int = 8
    #: The maximum number of prices of memory that are tried before a setting is divided into
    #: stages.
    prices_before_division: int = 3
    #: The maximum number of prices of memory that are tried to raise the final bound.
    prices_for_bound: int = 100
    #: The maximum number of settings that are tried with all schedules.
    rescheduled_settings: int = 8


#: The limits in use.
LIMITS = SearchLimits()
