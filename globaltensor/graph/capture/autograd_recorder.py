"""Recording of backward passes in build(), and of gradients that build() reads afterwards.

build() may read gradients to clip them, to scale them, or to add them to the loss. `local_recorder`
derives from the class here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ..._base import torch_private
from ..._base.pytree import tensors_in
from ..._ops import autograd_function
from ..._ops import backward as backward_pass
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.grad import get_grad, set_grad
from ...errors import GraphError
from ..program.nodes import ProgramCall, backward
from .reachability import leaves, reached
from .recorder_base import Recorder, line

__all__ = ["Differentiated", "Reached"]


class Reached(TorchFunctionMode):
    """A watcher of a custom Function, for leaves that the Function uses without being passed them.

    The Function's backward may fill the gradients of such leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_in(kwargs or {}, tensors_in(args, [])):
            local = t._stored if isinstance(t, GlobalTensor) else t
            if local.is_leaf and local.requires_grad and not torch_private.is_fake(local):
                self.leaves[id(t)] = t
        if func is autograd_function.applied:
            with self:
                return autograd_function.run(*args)
        return func(*args, **(kwargs or {}))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, watched by this mode while it runs.

        If ``function`` seeds the random generator, as it will in each step, the generator's state
        is restored afterwards."""

        def run(*args: Any, **kwargs: Any) -> Any:
            generator = torch.default_generator
            with torch_private.real_tensors():
                state, seed = generator.get_state(), generator.initial_seed()
            with self:
                out = function(*args, **kwargs)
            if generator.initial_seed() != seed:
                with torch_private.real_tensors():
                    generator.set_state(state)
            return out

        return run


class Differentiated(Recorder):
    """A recorder of backward passes on local tensors."""

    def __init__(self, fake: Any, rank: int) -> None:
        super().__init__(fake)
        self.rank = rank
        self._spent: set[int] = set()  # ids of losses whose backward() was called
        # id of a local tensor's fake tensor -> its gradient as a global tensor; () if not read yet
        self._grads: dict[int, Any] = {}
        # Parameters that custom Functions use without being passed them. No autograd graph leads to
        # them, but they may get gradients.
        self._apart: dict[int, torch.Tensor] = {}
        self.read = False  # whether build() reads gradients
        self.scale: fx.Node | None = None  # the factor of all gradients of a pass
        self.derived: dict[Any, Any] = {
            backward_pass.run: self._backward,
            get_grad: self._get_grad,
            set_grad: self._set_grad,
            torch.autograd.grad: self._autograd_grad,
            torch.autograd.backward: self._plain_backward,
            torch.Tensor.backward: self._plain_backward,
            torch.Tensor.retain_grad: self._reject_retain_grad,
        }

    @abstractmethod
    def standing(self, a: Any) -> Any: ...

    @abstractmethod
    def within(self, stand: torch.Tensor) -> bool: ...

    @abstractmethod
    def modes(self) -> None: ...

    @abstractmethod
    def made(
        self, shape: Any, dtype: torch.dtype, device: torch.device, from_: list[torch.Tensor]
    ) -> torch.Tensor: ...

    def reaches(self, leaves: Mapping[int, torch.Tensor]) -> None:
        """Record that a custom Function has used leaves that it was not passed."""
        for t in leaves.values():
            local = t._local if isinstance(t, GlobalTensor) else t
            self.of(local)
            self._apart[id(local)] = local

    def _backward(
        self, locals_: Any, seeds: Any, retain_graph: Any, create_graph: Any, into: Any
    ) -> None:
        if create_graph or into is not None:
            raise GraphError(
                "inside build(), backward() takes neither create_graph=True nor inputs=: "
                "gradients go to the parameters, for the optimizers"
            )
        self.modes()
        if self.scale is None:
            self.scale = self.placeholder("scale", 1.0)
        if not retain_graph and any(id(t) in self._spent for t in locals_):
            raise GraphError(
                "build() calls backward() twice from one loss: pass retain_graph=True the first "
                f"time, or add the losses\n  {line()}"
            )
        self._spent.update(map(id, locals_))
        self.node(
            backward,
            (self.arg(list(locals_)), self.arg(list(seeds)), self.scale),
            {"retain_graph": bool(retain_graph)},
            None,
            effect=True,
        )
        for leaf in [
            *leaves([self.standing(t) for t in locals_]),
            *map(self.standing, self._apart.values()),
        ]:
            if leaf.grad is None:
                with self.fake:
                    leaf.grad = torch.empty_like(leaf, requires_grad=False)
                self.alive.append(leaf.grad)
            if isinstance(self._grads.get(id(leaf), ()), tuple):
                self._grads[id(leaf)] = ()

    def _get_grad(self, x: GlobalTensor) -> GlobalTensor | None:
        """Return a leaf's gradient after the last backward pass, or None if it has none."""
        local = self.standing(x._materialize()._local)
        grad = self._grads.get(id(local))
        if grad is None or isinstance(grad, GlobalTensor):
            return grad
        self.read = True
        if self.within(local):  # not a parameter: its gradient is summed only here
            self.modes()
            out = self.made(local.shape, local.dtype, local.device, [])
            self.node(getattr, (self.of(local), "grad"), {}, out, effect=True)
            with self:
                grad = self._grads[id(local)] = GlobalTensor.wrap(out, x._spec.dual()).to_global(
                    sbp=x.sbp
                )
            return grad
        shares = x._leaf.grad_spec if x._leaf is not None else x._grad_shard or x._spec
        self.modes()
        out = self.made(
            shares.local_shape(self.rank) if self.rank in shares.placement._coordinates else (0,),
            x._spec.dtype,
            local.device,
            [],
        )
        self.node(
            ProgramCall(lambda _: get_grad(x)._materialize()._local, "gradient"),
            (self.of(local),),
            {},
            out,
            effect=True,
        )
        grad = self._grads[id(local)] = GlobalTensor.wrap(out, shares)
        return grad

    def _set_grad(self, x: GlobalTensor, value: GlobalTensor | None) -> None:
        if value is not None and not isinstance(value, GlobalTensor):
            set_grad.__wrapped__(x, value)  # type: ignore[attr-defined]
        self.read = True
        self.modes()
        x, spec = x._materialize(), None if value is None else value._materialize()._spec
        step = ProgramCall(
            lambda _, local: set_grad(x, None if spec is None else GlobalTensor.wrap(local, spec)),
            "set_gradient",
        )
        self.node(
            step,
            (self.of(x._local), None if value is None else self.of(value._local)),
            {},
            None,
            effect=True,
        )
        self._grads[id(self.standing(x._local))] = value

    def _autograd_grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        *args: Any,
        **options: Any,
    ) -> Any:
        outs, wanted, seeds = (
            list(v) if isinstance(v, (tuple, list)) else [v]
            for v in self.standing((outputs, inputs, grad_outputs))
        )
        unused, zeros = (
            options.get("allow_unused") or options.get("materialize_grads"),
            options.get("materialize_grads"),
        )
        input_grads: list[Any] = []
        if not torch.is_grad_enabled() and not any(o.requires_grad for o in outs):
            raise GraphError(
                "build() asks for gradients of a tensor that was computed without autograd: a "
                "graph without an optimizer runs as under torch.no_grad(); compute the tensor "
                "under torch.enable_grad(), from x.detach().requires_grad_() where x is an "
                f"input\n  {line()}"
            )
        for t, is_reached in zip(wanted, reached(outs, wanted), strict=True):
            if not is_reached and not unused:
                raise RuntimeError(
                    "One of the differentiated Tensors appears to not have been used in the "
                    "graph. Set allow_unused=True if this is desired."
                )
            linked = [*outs, *[s for s in seeds if s is not None]] if create_graph else []
            input_grads.append(
                self.made(t.shape, t.dtype, t.device, linked) if is_reached or zeros else None
            )
        self.modes()
        call_args = (
            outs,
            wanted,
            None if grad_outputs is None else seeds,
            retain_graph,
            create_graph,
            *args,
        )
        self.node(
            torch.autograd.grad,
            self.arg(call_args),
            self.arg(options),
            tuple(input_grads),
            effect=True,
        )
        return tuple(input_grads)

    def _reject_retain_grad(self, *args: Any) -> None:
        raise GraphError(
            "inside build(), retain_grad() has no effect: torch.autograd.grad returns the "
            f"gradient of a tensor that is not a parameter\n  {line()}"
        )

    def _plain_backward(
        self,
        tensors: Any,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
        **_: Any,
    ) -> None:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if gradient is None and any(t.numel() != 1 for t in tensors):
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if not any(self.standing(t).requires_grad for t in tensors):
            how = (
                ""
                if torch.is_grad_enabled()
                else (
                    ": a graph computes without gradients until it has an optimizer (add_optimizer)"
                )
            )
            raise GraphError(
                f"build() calls backward() of a tensor that does not require grad{how}\n  {line()}"
            )
        seeds = (
            [None] * len(tensors)
            if gradient is None
            else [gradient]
            if isinstance(gradient, torch.Tensor)
            else list(gradient)
        )
        with self:
            seeds = [
                torch.ones_like(t) if s is None else s for t, s in zip(tensors, seeds, strict=True)
            ]
        self._backward(tensors, seeds, retain_graph, create_graph, inputs)
