"""AdamW by torch's fused kernel, without torch.optim, whose optimizers import torch._dynamo when they are made.

That import takes as much CPU time as the import of torch: a third of the time that a rank computes before its first
step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memo.spec.moments import PIECE

MomentDtypes = tuple[torch.dtype | None, torch.dtype | None]
"""The dtypes of exp_avg and exp_avg_sq; None: the dtype of their parameter."""

_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters, gradients, exp_avg, exp_avg_sq and step counts."""


class AdamW:
    """The part of torch.optim.AdamW(..., fused=True) that memo uses, with the same bits and the same memory requests.

    All parameters lie on one device and have one dtype. Moments in bf16 have the bits of torch's moments after these
    are rounded to nearest in each step (memo.spec.moments); parameters with bf16 moments are 1-D.

    Attributes:
        param_groups: each has the keys "params", "weight_decay" and "lr".
        state: for each parameter "step", an fp32 scalar on its device, "exp_avg" and "exp_avg_sq"; the first step
            makes states that do not exist yet.
        found_inf: an fp32 scalar on the parameters' device, as torch.amp.GradScaler has it; if it is 1, a step
            changes nothing.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: MomentDtypes = (None, None),
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.found_inf: Tensor | None = None
        self._betas, self._eps, self._moments = betas, eps, moments

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        states = [self.state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        gradients = [p.grad for p in parameters if p.grad is not None]
        exp_avgs, exp_avg_sqs = ([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq"))
        whole = parameters, gradients, exp_avgs, exp_avg_sqs, steps
        torch._foreach_add_(steps, 1)
        is_wide = {exp_avgs[0].dtype, exp_avg_sqs[0].dtype} == {parameters[0].dtype}
        for weights, grads, first, second, counts in [whole] if is_wide else _pieces(whole):
            torch._fused_adamw_(
                weights,
                grads,
                first,
                second,
                [],  # the maxima of second moments, which only AMSGrad keeps
                counts,
                lr=lr,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))

    def state_of(self, parameter: Tensor, moments: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the state of a parameter, made on the first call; `moments` (zeros) are then its memory, if given."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            zeros = moments or [torch.zeros_like(parameter, dtype=dtype) for dtype in self._moments]
            state["exp_avg"], state["exp_avg_sq"] = zeros
        return state


def _pieces(whole: _Lists) -> Iterator[_Lists]:
    """Yield one piece of a parameter after another with widened moments; round these back after the piece's update."""
    parameters, _, *moments, _ = whole
    size, dtype = min(PIECE, max(map(Tensor.numel, parameters))), parameters[0].dtype
    scratch = [parameters[0].new_empty(0 if of_all[0].dtype == dtype else size) for of_all in moments]
    for *flat, step in zip(*whole, strict=True):
        for weight, gradient, *kept in zip(*(tensor.detach().split(PIECE) for tensor in flat), strict=True):
            wide = [m if m.dtype == dtype else s[: len(m)].copy_(m) for m, s in zip(kept, scratch, strict=True)]
            yield [weight], [gradient], [wide[0]], [wide[1]], [step]
            for moment, updated in zip(kept, wide, strict=True):
                if updated is not moment:
                    moment.copy_(updated)
