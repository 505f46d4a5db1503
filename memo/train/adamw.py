"""AdamW by torch's fused kernel, without torch.optim: to make one of its optimizers imports torch._dynamo.

That import takes as much CPU time as that of torch itself: a third of what a rank computes before its first step.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from memo.spec.moments import PIECE

MomentDtypes = tuple[torch.dtype | None, torch.dtype | None]
"""Of exp_avg and exp_avg_sq; None: that of their parameter."""

_Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters, gradients, exp_avg, exp_avg_sq and counts of steps."""


class AdamW:
    """What memo uses of torch.optim.AdamW(..., fused=True), with the same bits and the same requests for memory.

    All parameters lie on one device and have one dtype. Moments in bf16 have the bits of torch's that are rounded to
    the nearest after each step (memo.spec.moments), and their parameters are 1-D.

    Attributes:
        param_groups: each with the keys "params", "weight_decay" and "lr".
        state: by parameter: "step", an fp32 scalar on its device, "exp_avg" and "exp_avg_sq"; made in the first step
            where nobody made them before.
        found_inf: an fp32 scalar on the parameters' device, as of torch.amp.GradScaler; where it is 1, a step changes
            nothing.
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
        """Updates every parameter that has a gradient."""
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
                [],  # the largest second moments, which only AMSGrad keeps
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
        """Made before the first step, in the memory of `moments` if they are given, which then are zero."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            zeros = moments or [torch.zeros_like(parameter, dtype=dtype) for dtype in self._moments]
            state["exp_avg"], state["exp_avg_sq"] = zeros
        return state


def _pieces(whole: _Lists) -> Iterator[_Lists]:
    """One piece of one parameter after the other, its moments widened; they are rounded back once it is updated."""
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
