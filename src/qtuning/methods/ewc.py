"""Elastic weight consolidation (Kirkpatrick et al., 2017): weights that mattered are held where they were.

The penalty is lambda / 2 sum F (theta - theta*)^2 (Eq. 3 of that paper), with F the diagonal Fisher
information of earlier tasks, summed over them, and theta* the weights after the last one (online form).

Relations: `continual-finetune` with that penalty; at `ewc_strength: 0` it is `continual-finetune`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtuning.methods import MethodInfo, register
from qtuning.methods.finetuning import ContinualFineTune, Lesson, WeightState
from qtuning.weights import Hooks, kept_on_cpu, taking_steps


def fisher_diagonal(
    loss: Callable[[int], Tensor], count: int, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Mean over examples of the squared gradient of each one's negative log-likelihood."""
    total = [torch.zeros_like(p) for p in parameters]
    for example in range(count):
        found = torch.autograd.grad(
            loss(example), list(parameters), allow_unused=True, materialize_grads=True
        )
        torch._foreach_addcmul_(total, found, found, value=1 / count)
    return total


class EWCHooks(Hooks):
    """The penalty's own gradient, lambda F (theta - theta*), added to that of every step.

    The step is the one that the penalty in the loss would give, without a graph over all weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        anchor: Mapping[str, Tensor],
        fisher: Mapping[str, Tensor],
        strength: float,
    ):
        used = {n: p for n, p in parameters.items() if fisher[n].any()}
        self.parameters, self.strength = list(used.values()), strength
        self.anchor = [anchor[n].to(p.device) for n, p in used.items()]
        self.fisher = [fisher[n].to(p.device) for n, p in used.items()]

    @torch.no_grad()
    def edit_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add it, all tensors in one launch."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        away = torch._foreach_sub(self.parameters, self.anchor)
        torch._foreach_addcmul_(gradients, self.fisher, away, value=self.strength)


class EWC(ContinualFineTune):
    """Online EWC: one anchor, Fisher information summed over tasks."""

    def hooks(self, state: WeightState, lesson: Lesson) -> Hooks:
        """The penalty, from the second task on."""
        if not state.extra:
            return Hooks()
        parameters = dict(self.worker.model.named_parameters())
        return EWCHooks(parameters, state.weights, state.extra, self.settings.ewc_strength)

    def after(self, state: WeightState, lesson: Lesson, facts: dict[str, float]) -> WeightState:
        """Add this task's Fisher information."""
        new = super().after(state, lesson, facts)
        train = lesson.train
        parameters = dict(self.worker.model.named_parameters())
        with taking_steps(self.worker):
            found = fisher_diagonal(
                lambda i: train.loss([i]), len(train), list(parameters.values())
            )
        if state.extra:
            torch._foreach_add_(found, [state.extra[n].to(found[0].device) for n in parameters])
        fisher = kept_on_cpu(dict(zip(parameters, found, strict=True)))
        return replace(new, extra=fisher)


register(
    MethodInfo(
        name="ewc",
        description="fine-tuning with a penalty on moving the weights that mattered to earlier tasks",
        paper="Kirkpatrick et al., 2017, arXiv 1612.00796",
        make=EWC,
        forgets=True,
        packable=False,
        grid={"ewc_strength": (0.1, 1.0, 10.0), "weights_lr": (1.0, 3.0)},
    )
)
