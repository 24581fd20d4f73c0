"""LAMB: layer-wise adaptive rates for large batches.

Users construct it as `flow.optim.LAMB`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAMB"]


class LAMB(torch.optim.Optimizer):
    """An Adam optimizer whose steps are scaled by layer-wise trust ratios, with OneFlow's options.

    The step of each parameter is scaled by the norm of the parameter over that of the step (You et
    al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes"). On global
    parameters both norms are of the full parameter, whatever its sbp.

    ``adam_w_mode``: weight decay is applied separately from Adam's step (Loshchilov and Hutter
    2019). It is scaled like the step but, as in OneFlow, is not part of its norm. Otherwise it is
    added to the gradient. ``contiguous_params`` has no effect. Raises ValueError for a negative
    rate, epsilon or decay, for betas outside [0, 1), and for ``amsgrad``, of which LAMB has no
    variant.

    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([w], lr=0.1)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> w.data
    tensor([2.6464, 3.6464])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0,
        adam_w_mode: bool = True, do_bias_correction: bool = True, amsgrad: bool = False,
        contiguous_params: bool = False,
    ) -> None:  # fmt: skip
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"LAMB: {name} must not be negative, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB: betas must lie in [0, 1), got {betas}")
        if amsgrad:
            raise ValueError(
                "LAMB: there is no amsgrad variant of it; leave amsgrad=False, or use Adam"
            )
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
        }
        super().__init__(
            params,
            {
                **options,
                "do_bias_correction": do_bias_correction,
                "amsgrad": amsgrad,
                "contiguous_params": contiguous_params,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient.

        Returns the result of ``closure``, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._change(p, p.grad, group)
        return loss

    def _change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), decay = self.state[p], group["betas"], group["weight_decay"]
        if not state:
            # a tensor, because static graphs count it on
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        if decay and not group["adam_w_mode"]:
            grad = grad + decay * p
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["do_bias_correction"]:
            steps = state["step"].to(p.device)
            change = (mean / (1 - beta1**steps)).div_(
                (square / (1 - beta2**steps)).sqrt_().add_(group["eps"])
            )
        else:
            change = mean / square.sqrt().add_(group["eps"])
        size, length = p.norm(), change.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        if decay and group["adam_w_mode"]:
            change = change + decay * p
        p.sub_(change * (trust * group["lr"]))
