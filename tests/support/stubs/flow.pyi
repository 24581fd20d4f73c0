# The hand-written part of globaltensor/__init__.pyi: what signatures at run time do not say.

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Ts = TypeVarTuple("_Ts")
_M = TypeVar("_M", bound=_torch.nn.Module)
_Pytree = TypeVar("_Pytree", bound=Mapping[Any, Any] | Sequence[Any])
_Function = TypeVar("_Function", bound=Callable[..., Any])
_SbpOf: TypeAlias = Callable[[_builtins.str, Tensor], _sbp.Sbp | Sequence[_sbp.Sbp]]
_SbpChoice: TypeAlias = (
    _sbp.Sbp | Sequence[_sbp.Sbp] | Mapping[_builtins.str, _sbp.Sbp | Sequence[_sbp.Sbp]] | _SbpOf
)
_Sbp: TypeAlias = _sbp.Sbp | Sequence[_sbp.Sbp]
_Scalar: TypeAlias = _builtins.int | _builtins.float | _builtins.complex

__version__: _builtins.str

class Tensor(_torch.Tensor):
    """A tensor that can be global: what functions of this library return.

    At run time any ``torch.Tensor`` is one, and global tensors are `GlobalTensor`. Annotate what a
    function accepts by ``torch.Tensor`` where it accepts tensors of torch's own functions too.
    """

    def __init__(
        self,
        *args: Any,
        placement: Placement | None = None,
        sbp: _Sbp | None = None,
        **options: Any,
    ) -> None: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def sbp(self) -> tuple[_sbp.Sbp, ...]: ...
    @property
    def spec(self) -> Spec: ...
    @property
    def is_global(self) -> _builtins.bool: ...
    @property
    def is_local(self) -> _builtins.bool: ...
    @property
    def is_lazy(self) -> _builtins.bool: ...
    @property
    def grad(self) -> Tensor | None: ...
    @grad.setter
    def grad(self, value: _torch.Tensor | None) -> None: ...
    @property
    def data(self) -> Tensor: ...
    @data.setter
    def data(self, value: _torch.Tensor) -> None: ...
    def to_global(
        self,
        placement: Placement | None = None,
        sbp: _Sbp | None = None,
        *,
        grad_sbp: _Sbp | None = None,
        check_meta: _builtins.bool = True,
        copy: _builtins.bool = False,
    ) -> Tensor: ...
    def local_to_global(
        self,
        placement: Placement | None = None,
        sbp: _Sbp | None = None,
        *,
        check_meta: _builtins.bool = True,
        copy: _builtins.bool = False,
    ) -> Tensor: ...
    def to_local(self, *, grad_sbp: _Sbp | None = None, copy: _builtins.bool = False) -> Tensor: ...
    def global_id(self) -> _builtins.int: ...
    def check_meta_consistency(self) -> None: ...
    # torch's methods that torch does not annotate
    def __iter__(self) -> Iterator[Tensor]: ...
    def __len__(self) -> _builtins.int: ...
    def __hash__(self) -> _builtins.int: ...
    def __reversed__(self) -> Tensor: ...
    def __format__(self, format_spec: _builtins.str, /) -> _builtins.str: ...
    def backward(
        self,
        gradient: _torch.Tensor | None = None,
        retain_graph: _builtins.bool | None = None,
        create_graph: _builtins.bool = False,
        inputs: _torch.Tensor | Sequence[_torch.Tensor] | None = None,
    ) -> None: ...
    def register_hook(self, hook: Callable[[Any], Any]) -> Any: ...
    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any: ...
    def is_shared(self) -> _builtins.bool: ...
    def share_memory_(self) -> Self: ...
    def norm(
        self,
        p: _Scalar | _builtins.str | None = "fro",
        dim: _builtins.int | Sequence[_builtins.int] | None = None,
        keepdim: _builtins.bool = False,
        dtype: _torch.dtype | None = None,
    ) -> Tensor: ...
    def split(
        self, split_size: _builtins.int | Sequence[_builtins.int], dim: _builtins.int = 0
    ) -> tuple[Tensor, ...]: ...
    def unflatten(self, dim: _builtins.int | _builtins.str, sizes: Sequence[Any]) -> Tensor: ...
    def unique(
        self,
        sorted: _builtins.bool = True,
        return_inverse: _builtins.bool = False,
        return_counts: _builtins.bool = False,
        dim: _builtins.int | None = None,
    ) -> Any: ...
    def unique_consecutive(
        self,
        return_inverse: _builtins.bool = False,
        return_counts: _builtins.bool = False,
        dim: _builtins.int | None = None,
    ) -> Any: ...
    def tolist(self) -> Any: ...
    def to_sparse_coo(self) -> Tensor: ...
    # GENERATED MEMBERS

class GlobalTensor(Tensor):
    """A tensor spread over the ranks of a placement."""

@overload
def to_global(
    x: _torch.Tensor,
    placement: Placement | None = None,
    sbp: _Sbp | _SbpOf | None = None,
    *,
    grad_sbp: _Sbp | None = None,
    check_meta: _builtins.bool = True,
    copy: _builtins.bool = False,
) -> Tensor: ...
@overload
def to_global(
    x: _Pytree,
    placement: Placement | None = None,
    sbp: _Sbp | _SbpOf | None = None,
    *,
    grad_sbp: _Sbp | None = None,
    check_meta: _builtins.bool = True,
    copy: _builtins.bool = False,
) -> _Pytree: ...
@overload
def to_local(
    x: _torch.Tensor, *, grad_sbp: _Sbp | None = None, copy: _builtins.bool = False
) -> Tensor: ...
@overload
def to_local(
    x: _Pytree, *, grad_sbp: _Sbp | None = None, copy: _builtins.bool = False
) -> _Pytree: ...
def local_to_global(
    x: _torch.Tensor,
    placement: Placement,
    sbp: _Sbp,
    *,
    check_meta: _builtins.bool = True,
    copy: _builtins.bool = False,
) -> Tensor: ...
def global_to_global(
    x: _torch.Tensor,
    placement: Placement | None = None,
    sbp: _Sbp | None = None,
    *,
    grad_sbp: _Sbp | None = None,
    copy: _builtins.bool = False,
) -> Tensor: ...
def parallelize(
    model: _M,
    placement: Placement,
    plan: _SbpChoice | _builtins.str | Sequence[_builtins.str] | _Plan,
    *,
    inputs: Any = None,
) -> _M: ...
def local_map(
    function: Callable[_P, _R],
    out_sbp: _Sbp | Sequence[_Sbp | None] | None,
    in_sbp: _Sbp | Sequence[_Sbp | None] | None = None,
    *,
    placement: Placement | None = None,
) -> Callable[_P, _R]: ...
def run(
    fn: Callable[[Unpack[_Ts]], _R],
    *args: Unpack[_Ts],
    nprocs: _builtins.int = 2,
    backend: _builtins.str = "auto",
    timeout: _builtins.float | None = None,
    start_timeout: _builtins.float = 120.0,
) -> list[_R]: ...

_Target: TypeAlias = (
    _builtins.str | Callable[..., Any] | Sequence[_builtins.str | Callable[..., Any]]
)

@overload
def rule(
    target: _Target,
    notation: _builtins.str,
    *,
    linear: Sequence[Sequence[_builtins.int]] = (),
    addends: Sequence[_builtins.int] = (),
    scalars: _builtins.bool = False,
) -> Any: ...
@overload
def rule(
    target: _Target,
    notation: None = None,
    *,
    linear: Sequence[Sequence[_builtins.int]] = (),
    addends: Sequence[_builtins.int] = (),
    scalars: _builtins.bool = False,
) -> Callable[[_Function], _Function]: ...
def save(
    obj: object,
    f: _builtins.str | os.PathLike[_builtins.str] | IO[_builtins.bytes],
    *args: Any,
    global_dst_rank: _builtins.int | None = None,
    save_as_external_data: _builtins.bool = False,
    **options: Any,
) -> None: ...
def load(
    f: _builtins.str | os.PathLike[_builtins.str] | IO[_builtins.bytes],
    map_location: Any = None,
    *args: Any,
    global_src_rank: _builtins.int | None = None,
    **options: Any,
) -> Any: ...
def transpose(
    input: _torch.Tensor,
    *dims: _builtins.int | Sequence[_builtins.int] | None,
    dim0: _builtins.int = ...,
    dim1: _builtins.int = ...,
) -> Tensor: ...

# torch's functions that torch does not annotate
def manual_seed(seed: _builtins.int) -> _torch.Generator: ...
def broadcast_tensors(*tensors: _torch.Tensor | Sequence[_torch.Tensor]) -> tuple[Tensor, ...]: ...
def broadcast_shapes(*shapes: Sequence[_builtins.int] | _builtins.int) -> _torch.Size: ...
def split(
    tensor: _torch.Tensor,
    split_size_or_sections: _builtins.int | Sequence[_builtins.int],
    dim: _builtins.int = 0,
) -> tuple[Tensor, ...]: ...
def block_diag(*tensors: _torch.Tensor) -> Tensor: ...
def cdist(
    x1: _torch.Tensor,
    x2: _torch.Tensor,
    p: _builtins.float = 2.0,
    compute_mode: _builtins.str = "use_mm_for_euclid_dist_if_necessary",
) -> Tensor: ...
def chain_matmul(*matrices: _torch.Tensor, out: _torch.Tensor | None = None) -> Tensor: ...
@overload
def atleast_1d(tensor: _torch.Tensor, /) -> Tensor: ...
@overload
def atleast_1d(*tensors: _torch.Tensor | Sequence[_torch.Tensor]) -> tuple[Tensor, ...]: ...
@overload
def atleast_2d(tensor: _torch.Tensor, /) -> Tensor: ...
@overload
def atleast_2d(*tensors: _torch.Tensor | Sequence[_torch.Tensor]) -> tuple[Tensor, ...]: ...
@overload
def atleast_3d(tensor: _torch.Tensor, /) -> Tensor: ...
@overload
def atleast_3d(*tensors: _torch.Tensor | Sequence[_torch.Tensor]) -> tuple[Tensor, ...]: ...
def unique(
    input: _torch.Tensor,
    sorted: _builtins.bool = True,
    return_inverse: _builtins.bool = False,
    return_counts: _builtins.bool = False,
    dim: _builtins.int | None = None,
) -> Any: ...
def unique_consecutive(
    input: _torch.Tensor,
    return_inverse: _builtins.bool = False,
    return_counts: _builtins.bool = False,
    dim: _builtins.int | None = None,
) -> Any: ...
