"""Tests of bad input. Each error names the problem, its place and a fix, on every rank. The program
continues to work afterwards."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.everywhere import full
from support.pool import run_on

import globaltensor as flow
from globaltensor import errors
from globaltensor.distributed.simulate import simulate

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
PAIR = flow.placement("cpu", [0, 1])
GRID = flow.placement("cpu", [[0, 1]])


def ones(sbp: Any = None, placement: Any = PAIR, **options: Any) -> torch.Tensor:
    """Return ones, split by rows unless another sbp is given."""
    sbp = S(0) if sbp is None else sbp
    return flow.ones(4, 4, placement=placement, sbp=sbp, **options)


def still_works() -> None:
    x, w = ones(S(0)), ones(S(1), requires_grad=True)
    (x @ w + ones(P)).sum().backward()
    assert full(w.grad).tolist() == [[4.0] * 4] * 4


#: (error, texts that it must contain, a function that raises it)
ROWS: list[tuple[type[BaseException], list[str], Callable[[], Any]]] = []


def row(kind: type[BaseException], *texts: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(body: Callable[[], Any]) -> Callable[[], Any]:
        ROWS.append((kind, list(texts), body))
        return body

    return add


# --------------------------------------------------------------------------------------- placements


@row(
    errors.PlacementError,
    "add(f32[4, 4] S(0), f32[4, 4] S(0))",
    "different placements",
    "ranks=[0])",
    "ranks=[1])",
    "to_global(placement=",
)
def mixed_placements() -> None:
    ones(placement=flow.placement("cpu", [0])) + ones(placement=flow.placement("cpu", [1]))


@row(errors.PlacementError, "different placements", "ranks=[0, 1])", "ranks=[1, 0])")
def the_same_ranks_in_another_order() -> None:
    torch.matmul(ones(), ones(placement=flow.placement("cpu", [1, 0])))


@row(errors.PlacementError, "different placements", "ranks=[[0, 1]])")
def mixed_placements_in_a_list() -> None:
    torch.cat([ones(), ones([B, B], GRID)])


@row(
    errors.PlacementError,
    "names rank 2",
    "this world has 2 ranks (0 to 1)",
    "start more processes (--nproc_per_node), or use fewer ranks",
)
def rank_outside_the_world() -> None:
    flow.zeros(4, placement=flow.placement("cpu", [0, 2]), sbp=B)


@row(errors.PlacementError, "names rank 7", "this world has 2 ranks")
def rank_outside_the_world_in_to_global() -> None:
    torch.ones(4).to_global(placement=flow.placement("cpu", [7]), sbp=B)


@row(errors.PlacementError, "names rank 2, 3", "this world has 2 ranks")
def rank_outside_the_world_in_a_move() -> None:
    ones().to_global(placement=flow.placement("cpu", [2, 3]))


@row(errors.PlacementError, "names rank 5")
def rank_outside_the_world_for_a_module() -> None:
    torch.nn.Linear(2, 2).to_global(flow.placement("cpu", [5]), B)


@row(errors.PlacementError, "duplicate rank 1", "each rank may appear once")
def duplicate_rank() -> None:
    flow.placement("cpu", [0, 1, 1])


@row(errors.PlacementError, "negative")
def negative_rank() -> None:
    flow.placement("cpu", [0, -1])


@row(errors.PlacementError, "unknown device type 'tpu'", "known: cpu, cuda")
def unknown_device() -> None:
    flow.placement("tpu", [0])


@row(errors.PlacementError, "must be integers")
def ranks_that_are_no_integers() -> None:
    flow.placement("cpu", [0.0, 1.0])


@row(errors.PlacementError, "rows of equal length")
def ragged_ranks() -> None:
    flow.placement("cpu", [[0, 1], [2]])


@row(
    errors.PlacementError,
    "placement must be a globaltensor.placement",
    """got 'cpu': all ranks are flow.placement.all("cpu")""",
)
def no_placement_at_all() -> None:
    torch.ones(2).to_global(placement="cpu", sbp=B)


@row(errors.PlacementError, "device='cpu'", "leave out device")
def device_and_placement() -> None:
    flow.ones(2, placement=PAIR, sbp=B, device="cpu")


@row(errors.PlacementError, "ones got sbp=", "no placement", "add placement=")
def sbp_without_placement() -> None:
    flow.ones(2, sbp=B)


# ---------------------------------------------------------------------------------------------- sbp


@row(errors.SbpError, "ones got a placement but no sbp", "add sbp=")
def placement_without_sbp() -> None:
    flow.ones(2, placement=PAIR)


@row(errors.SbpError, "sbp has 2 entries, but the placement has 1 axis")
def too_many_sbp() -> None:
    ones([S(0), S(1)])


@row(errors.SbpError, "sbp has 1 entry, but the placement has 2 axes", "one entry for each axis")
def too_few_sbp() -> None:
    torch.ones(4, 4).to_global(placement=GRID, sbp=S(0))


@row(errors.SbpError, "sbp has 2 entries, but the placement has 1 axis")
def too_many_sbp_in_a_move() -> None:
    ones().to_global(sbp=[B, B])


@row(errors.SbpError, "2 axes", "is for 1", "give sbp=")
def a_move_to_more_axes_without_sbp() -> None:
    ones().to_global(placement=GRID)


@row(errors.SbpError, "grad_sbp has 2 entries, but the placement has 1 axis")
def too_many_grad_sbp() -> None:
    ones(requires_grad=True).to_global(sbp=B, grad_sbp=[B, B])


@row(errors.SbpError, "'split'", "split(dim), broadcast or partial_sum")
def sbp_by_name() -> None:
    ones("split")


@row(errors.SbpError, "takes an integer dim", "1.5")
def split_of_no_dim() -> None:
    S(1.5)  # type: ignore[arg-type]


@row(errors.SbpError, "splits dim 2 on axis 0", "2 dims (shape [4, 4])", "use split(0) to split(1)")
def split_beyond_the_dims() -> None:
    ones(S(2))


@row(errors.SbpError, "splits dim 3 on axis 0", "1 dim (shape [2]): use split(0)")
def split_beyond_the_only_dim() -> None:
    flow.ones(2, placement=flow.placement("cpu", [0]), sbp=S(3))


@row(errors.SbpError, "splits dim -3 on axis 0", "2 dims (shape [4, 4])")
def split_below_the_dims() -> None:
    ones(S(-3))


@row(errors.SbpError, "splits dim 1 on axis 0", "(shape [4])")
def split_beyond_the_dims_in_a_move() -> None:
    flow.ones(4, placement=PAIR, sbp=S(0)).to_global(sbp=S(1))


@row(errors.SbpError, "splits dim 0 on axis 0", "use broadcast or partial_sum for a 0-dim tensor")
def split_of_a_number() -> None:
    torch.tensor(1.0).to_global(placement=PAIR, sbp=S(0))


@row(errors.SbpError, "needs placement", "flow.placement(")
def to_global_without_placement() -> None:
    torch.ones(2).to_global(sbp=B)


@row(errors.SbpError, "needs sbp", "flow.sbp.split(0)")
def to_global_without_sbp() -> None:
    torch.ones(2).to_global(placement=PAIR)


@row(errors.LocalTensorError, "FloatTensor of a global tensor", "to_local()", "detach()")
def old_constructor_of_a_global_tensor() -> None:
    flow.FloatTensor(ones())


@row(errors.LocalTensorError, "a local tensor has no .global_id", "to_global(placement, sbp)")
def id_of_a_local_tensor() -> None:
    torch.ones(2).global_id()  # type: ignore[attr-defined]


@row(
    errors.GlobalTensorError,
    "SyncBatchNorm with a process_group",
    "leave out process_group",
    "local_map",
)
def batch_norm_of_a_group() -> None:
    torch.nn.SyncBatchNorm(4, process_group=object())(ones())


@row(errors.SbpError, "module.to_global needs placement and sbp", "weight of Linear is local")
def module_without_sbp() -> None:
    torch.nn.Linear(2, 2).to_global(PAIR)


@row(errors.SbpError, "no pattern matches 'bias'", "'*weight'", '"*": flow.sbp.broadcast')
def parameter_that_no_pattern_matches() -> None:
    torch.nn.Linear(2, 2).to_global(PAIR, {"*weight": S(0)})


@row(errors.SbpError, "sbp of '*weight' has 2 entries")
def pattern_with_too_many_sbp() -> None:
    torch.nn.Linear(2, 2).to_global(PAIR, {"*weight": [B, B], "*": B})


@row(errors.SbpError, "the callable gave for 'weight'", "2 entries")
def callable_with_too_many_sbp() -> None:
    torch.nn.Linear(2, 2).to_global(PAIR, lambda path, t: [B, B])


# ------------------------------------------------------------------------------ ranks that disagree


def at_rank(*values: Any) -> Any:
    return values[flow.env.get_rank()]


@row(
    errors.ShapeError,
    "rank 0 has float32[2, 3]",
    "rank 1 has float32[2, 4]",
    "dims that are not split must be equal",
)
def shapes_that_disagree() -> None:
    torch.ones(2, at_rank(3, 4)).to_global(placement=PAIR, sbp=S(0))


@row(errors.ShapeError, "rank 0 has float32[2, 3]", "rank 1 has float32[2, 4]")
def shapes_that_disagree_for_broadcast() -> None:
    torch.ones(2, at_rank(3, 4)).to_global(placement=PAIR, sbp=B)


@row(errors.ShapeError, "rank 0 has float32[3]", "rank 1 has float32[4]")
def shapes_that_disagree_for_partial() -> None:
    torch.ones(at_rank(3, 4)).to_global(placement=PAIR, sbp=P)


@row(
    errors.ShapeError,
    "rank 0 has float32[1, 2]",
    "rank 1 has float32[3, 2]",
    "rank 0: [2, 2]; rank 1: [2, 2]",
    "the first n mod p hold one more",
)
def a_split_that_is_not_balanced() -> None:
    torch.ones(at_rank(1, 3), 2).to_global(placement=PAIR, sbp=S(0))


@row(
    errors.ShapeError,
    "different dtypes",
    "rank 0 has float32[2]",
    "rank 1 has int64[2]",
    "cast them to one dtype",
)
def dtypes_that_disagree() -> None:
    torch.ones(2, dtype=at_rank(torch.float32, torch.int64)).to_global(placement=PAIR, sbp=B)


@row(
    errors.ShapeError,
    "different numbers of dims",
    "rank 0 has float32[2]",
    "rank 1 has float32[2, 1]",
)
def dims_that_disagree() -> None:
    torch.ones(at_rank((2,), (2, 1))).to_global(placement=PAIR, sbp=S(0))


@row(errors.ShapeError, "different models", "weight", "build the same module on every rank")
def models_that_disagree() -> None:
    torch.nn.Linear(2, at_rank(3, 4)).to_global(PAIR, B)


@row(
    errors.ShapeError,
    "rank 0 has float32[1, 4]",
    "rank 1 has float32[2, 4]",
    "do not form one tensor",
)
def parts_from_local_map_that_disagree() -> None:
    flow.local_map(lambda x: x[: 1 + flow.env.get_rank()], out_sbp=S(0))(ones())


# ----------------------------------------------------------------------------------------- in place


@row(
    errors.InplaceError,
    "in-place relu_ would need the sbp of its target changed",
    "f32[4, 4] P",
    "out-of-place",
    "x.to_global(sbp=...)",
)
def in_place_on_a_partial_sum() -> None:
    ones(P).relu_()


@row(errors.InplaceError, "in-place clamp_", "f32[4, 4] P")
def in_place_limits_of_a_partial_sum() -> None:
    ones(P).clamp_(0, 1)


@row(errors.InplaceError, "in-place", "to_global(sbp=")
def foreach_on_partial_sums() -> None:
    torch._foreach_sqrt_([ones(P), ones(P)])


@row(RuntimeError, "result type Float can't be cast to the desired output type Long")
def plain_out_of_a_narrower_dtype() -> None:
    torch.add(ones(), 1.5, out=torch.empty(4, 4, dtype=torch.int64))


@row(errors.InplaceError, "out= of add has torch.int64", "the result has torch.float32")
def out_of_a_narrower_dtype() -> None:
    torch.add(ones(), 1.5, out=flow.empty(4, 4, dtype=torch.int64, placement=PAIR, sbp=B))


@row(RuntimeError, "must be one of", "received: ab")
def unknown_indexing() -> None:
    torch.meshgrid(ones()[0], ones()[1], indexing="ab")


@row(RuntimeError, "Expected 0D or 1D tensor", "[4, 4]")
def grids_of_matrices() -> None:
    torch.meshgrid(ones()[0], ones(), indexing="ij")


@row(RuntimeError, "same dtype")
def grids_of_different_dtypes() -> None:
    torch.meshgrid(ones()[0], ones()[1].half(), indexing="ij")


@row(errors.InplaceError, "out= has shape [3]", "shape [4, 4]")
def out_of_another_shape() -> None:
    torch.add(ones(), ones(), out=flow.empty(3, placement=PAIR, sbp=B))


@row(RuntimeError, "leaf Variable that requires grad")
def writing_into_a_leaf() -> None:
    ones(requires_grad=True).add_(1)


# -------------------------------------------------------------------------- below torch's functions


class OfAList(torch.autograd.Function):
    """A function with a list as input: torch computes no gradients for tensors in a list."""

    @staticmethod
    def forward(ctx: Any, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0] * 2


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mul.out(x, x, out=torch.empty(4, 4))  # type: ignore[no-any-return]


@row(
    errors.KernelError,
    "custom torch.autograd.Function",
    "globaltensor.local_map(function, out_sbp=..., in_sbp=...)",
)
def custom_function_of_a_list() -> None:
    OfAList.apply([ones(requires_grad=True)])


@row(errors.KernelError, "globaltensor.local_map")
def custom_function_that_calls_a_kernel_which_writes() -> None:
    Written.apply(ones(requires_grad=True))


@row(errors.KernelError, "aten", "globaltensor.local_map")
def a_kernel() -> None:
    torch.ops.aten.add.out(ones(), ones(), out=ones())


@row(errors.SbpError, "local_map", "no argument is global")
def local_map_of_plain_tensors() -> None:
    flow.local_map(lambda x: x, out_sbp=B)(torch.ones(2))


@row(errors.SbpError, "local_map", "in_sbp has 3 entries for 2 tensors")
def local_map_with_too_many_sbp() -> None:
    flow.local_map(lambda x, y: x, out_sbp=B, in_sbp=[B, B, B])(ones(), ones())


@row(errors.SbpError, "local_map", "out_sbp has 2 entries for 1 tensors")
def local_map_with_fewer_results() -> None:
    flow.local_map(lambda x: x, out_sbp=[B, B], in_sbp=B)(ones())


# ---------------------------------------------------------------------------------------- no_boxing


@row(
    errors.BoxingError,
    "add: operand",
    "f32[4, 4] S(",
    "no_boxing() forbids hidden traffic",
    "x.to_global(sbp=[split(",
)
def no_boxing_add() -> None:
    with flow.no_boxing():
        ones() + ones()
        ones().to_global(sbp=B)  # written out: allowed
        ones(B) * ones(S(1))  # a slice, so no traffic
        ones(S(0)) + ones(S(1))


@row(errors.BoxingError, "matmul: operand", "no_boxing()")
def no_boxing_matmul() -> None:
    with flow.no_boxing():
        ones(S(0)) @ ones(S(0))


@row(
    errors.BoxingError, "relu: operand 0: f32[1] P", "reduce_scatter", "x.to_global(sbp=[split(0)])"
)
def no_boxing_of_a_partial_sum() -> None:
    x = flow.ones(1, placement=PAIR, sbp=P)
    with flow.no_boxing():
        F.relu(x)


@row(errors.BoxingError, "linear: operand 1", "all_gather", "no_boxing()")
def no_boxing_of_a_split_parameter() -> None:
    layer = torch.nn.Linear(4, 4, bias=False).to_global(PAIR, S(0))
    with flow.no_boxing():
        layer(flow.ones(64, 4, placement=PAIR, sbp=S(0)))


# ---------------------------------------------------------------------------------------- gradients


@row(RuntimeError, "only for scalar outputs", "[4, 4]", "pass gradient=")
def backward_of_no_scalar() -> None:
    (ones(requires_grad=True) * 2).backward()


@row(errors.SbpError, "gradient of size '[3]'", "tensor of size '[4, 4]'")
def plain_grad_of_another_shape() -> None:
    ones(requires_grad=True).grad = torch.ones(3)


@row(errors.SbpError, "gradient of size '[3]'", "tensor of size '[4, 4]'")
def grad_of_another_shape() -> None:
    ones(requires_grad=True).grad = flow.ones(3, placement=PAIR, sbp=B)


@row(errors.SbpError, "hook on a global tensor must return a tensor or None, not float")
def hook_that_returns_a_number() -> None:
    x = ones(requires_grad=True)
    x.register_hook(lambda g: 1.0)
    x.sum().backward()


@row(RuntimeError, "does not require grad")
def backward_of_a_constant() -> None:
    ones().sum().backward()


@row(RuntimeError, "backward through the graph a second time")
def backward_twice() -> None:
    y = (ones(requires_grad=True) ** 2).sum()
    y.backward()
    y.backward()


# -------------------------------------------------------------------------- reading, moving, shapes


@row(errors.GlobalTensorError, "to_local() of a tensor that is local already", "to_global")
def to_local_of_a_plain_tensor() -> None:
    torch.ones(2).to_local()


@row(errors.GlobalTensorError, "a local tensor has no .placement", "to_global(placement, sbp)")
def placement_of_a_plain_tensor() -> None:
    _ = torch.ones(2).placement


@row(errors.GlobalTensorError, "a local tensor has no .sbp", "to_global(placement, sbp)")
def sbp_of_a_plain_tensor() -> None:
    assert not hasattr(torch.ones(2), "sbp")
    assert getattr(torch.ones(2), "placement", None) is None
    _ = torch.ones(2).sbp


@row(errors.SbpError, ".data of a global tensor must be a tensor, not list")
def a_list_for_data() -> None:
    ones().data = [1.0, 2.0]  # type: ignore[assignment]


@row(errors.GlobalTensorError, "moves by device type, not to one device (cuda:5)", "x.to('cuda')")
def to_one_device() -> None:
    ones().to("cuda:5")


@row(errors.SbpError, "sbp must be split(dim), broadcast or partial_sum, or a list of them; got 0")
def number_for_an_sbp() -> None:
    flow.ones(4, placement=PAIR, sbp=0)  # type: ignore[arg-type]


@row(errors.SbpError, "got the string 'split(0)': write flow.sbp.split(0), flow.sbp.broadcast, ...")
def string_for_an_sbp() -> None:
    flow.ones(4, placement=PAIR, sbp="split(0)")  # type: ignore[arg-type]


@row(errors.SbpError, "got split without a dim: write split(0)")
def split_without_a_dim() -> None:
    flow.ones(4, placement=PAIR, sbp=flow.sbp.split)  # type: ignore[arg-type]


@row(errors.SbpError, "out_sbp is an sbp, or a list with one for each of 1 tensors", "got 0")
def number_for_the_sbp_of_a_result() -> None:
    flow.local_map(lambda t: t, out_sbp=0)(ones())


@row(errors.GlobalTensorError, "placements is a list of globaltensor.placement, one for each stage")
def one_placement_for_all_stages() -> None:
    flow.pipeline.cut(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), PAIR)  # type: ignore[arg-type]


@row(
    errors.SbpError,
    "parallelize takes a torch.nn.Module, not a Tensor",
    "x.to_global(placement, sbp)",
)
def a_tensor_by_the_name_of_a_plan() -> None:
    flow.parallelize(torch.ones(2), PAIR, "data")  # type: ignore[arg-type]


@row(errors.ClusterError, "use_cluster takes a Cluster, not 'dgx-h100'", "Cluster.preset")
def a_name_for_a_cluster() -> None:
    with flow.use_cluster("dgx-h100"):  # type: ignore[arg-type]
        pass


@row(RuntimeError, "x.detach().numpy()")
def numpy_of_a_tensor_with_gradient() -> None:
    ones(requires_grad=True).numpy()


@row(RuntimeError, "a Tensor with 16 elements cannot be converted to Scalar")
def item_of_many() -> None:
    ones().item()


@row(RuntimeError, "Boolean value of Tensor with more than one value is ambiguous")
def truth_of_many() -> None:
    bool(ones())


@row(RuntimeError, "mat1 and mat2 shapes cannot be multiplied (4x4 and 5x3)")
def product_that_does_not_fit() -> None:
    ones() @ flow.ones(5, 3, placement=PAIR, sbp=B)


@row(RuntimeError, "[3, 7]", "16")
def view_that_does_not_fit() -> None:
    ones().view(3, 7)


@row(IndexError, "index 9 is out of bounds", "size 4")
def index_that_does_not_fit() -> None:
    ones()[9]


@row(IndexError, "Dimension out of range")
def dim_that_does_not_fit() -> None:
    ones().sum(2)


@row(
    RuntimeError,
    "The size of tensor a (4) must match the size of tensor b (3) at non-singleton dimension 1",
)
def sum_that_does_not_fit() -> None:
    ones() + flow.ones(3, placement=PAIR, sbp=S(0))


# ---------------------------------------------------------------------------------------- the tests


def provoke(kind: type[BaseException], texts: list[str], body: Callable[[], Any]) -> None:
    try:
        with pytest.raises(kind) as found:
            body()
        said = str(found.value)
        for text in texts:
            assert text in said, f"{text!r} is not in the message:\n{said}"
        assert isinstance(found.value, (RuntimeError, IndexError))
    except BaseException as error:
        errors.noted(error, f"in {body.__name__}")
        raise
    # A failed backward leaves its exception, and with it this frame, in reference cycles. The
    # values of this frame must be freed.
    del found
    still_works()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].__name__)
def test_bad_input(row: tuple[type[BaseException], list[str], Callable[[], Any]]) -> None:
    simulate(2, provoke, *row, timeout=10.0)


def provoke_all() -> None:
    for row in ROWS:
        provoke(*row)
    gc.collect()


def test_bad_input_on_processes() -> None:
    run_on(2, provoke_all)


def test_every_error_is_a_runtime_error() -> None:
    kinds = [
        e for e in vars(errors).values() if isinstance(e, type) and e.__module__ == errors.__name__
    ]
    assert len(kinds) > 8
    assert all(
        issubclass(e, errors.GlobalTensorError) and issubclass(e, RuntimeError)
        for e in kinds
        if not issubclass(e, Warning)
    )
    assert all(e.__doc__ for e in kinds)


def test_a_function_without_a_rule_warns_once_and_is_right() -> None:
    def run() -> tuple[list[str], bool]:
        values = torch.arange(9.0).reshape(3, 3) ** 2 + torch.eye(3)
        x = values.to_global(PAIR, B).to_global(sbp=S(0)).requires_grad_()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            y = torch.linalg.matrix_exp(x * 0.01)
            torch.linalg.matrix_exp(x * 0.01)
        want = torch.linalg.matrix_exp(values * 0.01)
        y.sum().backward()
        return [
            str(w.message) for w in seen if issubclass(w.category, errors.FallbackWarning)
        ], torch.allclose(full(y), want) and x.grad is not None

    found = simulate(2, run)
    assert all(right for _, right in found)
    said = [text for texts, _ in found for text in texts]
    assert all(
        "no rule for" in text and "globaltensor.rule(" in text and "local_map" in text
        for text in said
    )
    assert len(said) <= 1, "once in a process"


def test_a_function_without_a_rule_is_named_as_rule_accepts_it() -> None:
    def run() -> list[str]:
        a, x = torch.eye(3).to_sparse(), torch.ones(3, 2).to_global(PAIR, B)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.sparse.mm(a, x)
        return [str(w.message) for w in seen if issubclass(w.category, errors.FallbackWarning)]

    for text in (text for texts in simulate(2, run) for text in texts):
        assert "no rule for torch.sparse.mm: " in text, text
        assert "globaltensor.rule(torch.sparse.mm, notation)" in text, text


def test_a_rank_that_does_not_come() -> None:
    def run() -> None:
        x = ones(S(0))
        if flow.env.get_rank() == 0:
            x.to_global(sbp=B)

    with pytest.raises(
        errors.WorldError,
        match=r"rank 0 waited in a collective among ranks \[0, 1\], but rank 1 has ended",
    ):
        simulate(2, run, timeout=10.0)


def test_a_wrong_call_in_a_graph_is_told_once() -> None:
    class Wrong(flow.nn.Graph):
        def build(self, x: Any) -> Any:
            return x @ torch.ones(3, 2)

    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(
            RuntimeError, match=r"(?s)\(4x4 and 3x2\).*while Wrong_\d+ was captured"
        ):
            simulate(2, lambda: Wrong()(ones(S(0))))
    finally:
        logger.removeHandler(handler)
    assert not logged
