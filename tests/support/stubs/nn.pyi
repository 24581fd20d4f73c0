# The hand-written part of globaltensor/nn/__init__.pyi: what signatures at run time do not say.

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)

class _HasForward(Protocol[_P, _R]):
    @property
    def forward(self) -> Callable[_P, _R]: ...

class Module(_torch.nn.Module):
    """A module of torch, with the methods that this library adds.

    A call has the parameters and the result of the ``forward`` that a class defines. At run time
    this class is ``torch.nn.Module``.
    """

    def __call__(self: _HasForward[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def __getattr__(self, name: _builtins.str) -> Tensor | Module: ...
    def to_global(
        self, placement: Placement | None = None, sbp: _SbpChoice | None = None
    ) -> Self: ...
    def to_local(self) -> Self: ...
    # GENERATED MEMBERS

class Parameter(_torch.nn.Parameter, Tensor):
    """A parameter of torch, with the methods that this library adds to tensors."""

    def __init__(self, data: _torch.Tensor = ..., requires_grad: _builtins.bool = ...) -> None: ...

class Buffer(_torch.nn.Buffer, Tensor):
    """A buffer of torch, with the methods that this library adds to tensors."""

    def __init__(
        self,
        data: _torch.Tensor = ...,
        requires_grad: _builtins.bool = ...,
        persistent: _builtins.bool = ...,
    ) -> None: ...

class Sequential(_torch.nn.Sequential, Module):
    def forward(self, input: Any) -> Tensor: ...
    # GENERATED MEMBERS

class _HasBuild(Protocol[_P, _R]):
    @property
    def build(self) -> Callable[_P, _R]: ...

class Graph(_Graph):
    """A graph. Its call has the parameters and the result of the ``build`` that a class defines."""

    def __call__(self: _HasBuild[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
