"""AdamW by torch's fused kernel, without torch.optim: to make one of its optimizers imports torch._dynamo.

That import takes as much CPU time as that of torch itself: a third of what a rank computes before its first step.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class AdamW:
    """What memo uses of torch.optim.AdamW(..., fused=True), with the same bits and the same requests for memory.

    All parameters lie on one device and have one dtype.

    Attributes:
        param_groups: each with the keys "params", "weight_decay" and "lr".
        state: by parameter: "step", an fp32 scalar on its device, "exp_avg" and "exp_avg_sq"; made in the first step
            where nobody made them before.
        found_inf: an fp32 scalar on the parameters' device, as of torch.amp.GradScaler; where it is 1, a step changes
            nothing.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.found_inf: Tensor | None = None
        self._betas, self._eps = betas, eps

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        states = [self._state(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # the largest second moments, which only AMSGrad keeps
            steps,
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

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
