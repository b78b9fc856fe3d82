"""AdamW, Adam and Lion for the parameters that are not matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from dmuown.algorithms.base import ElementwiseAlgorithm, register_muon_algorithm
from dmuown.errors import OptionError
from dmuown.state.spec import STEP, BufferSpec


@register_muon_algorithm
class AdamW(ElementwiseAlgorithm):
    """AdamW (arXiv 1711.05101) through torch's fused kernel: bit-equal to `torch.optim.AdamW(fused=True)`."""

    name: ClassVar[str] = "adamw"
    options: ClassVar[Mapping[str, Any]] = {
        "cautious_wd": False,
        "amsgrad": False,
        "fused_adam": None,
        "foreach_adam": None,
    }
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {
        "momentum": BufferSpec(like="grad"),
        "variance": BufferSpec(like="grad", signed=False),
        "step": STEP,
    }
    _decoupled: ClassVar[bool] = True

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse both kernels at once."""
        if options["fused_adam"] and options["foreach_adam"]:
            raise OptionError("fused_adam", "excludes foreach_adam", "Set only one of them")

    def update(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: Mapping[str, list[Tensor]],
        options: Mapping[str, Any],
    ) -> None:
        """See `ElementwiseAlgorithm.update`; state holds first and second moments and the step.

        `fused_adam=None` takes the fused kernel, unless `foreach_adam` asks for torch's foreach form (True)
        or its loop (False).
        """
        cautious = options["cautious_wd"] and self._decoupled
        before = [param.clone() for param in params] if cautious else []
        fused = options["foreach_adam"] is None if options["fused_adam"] is None else options["fused_adam"]
        update = torch_adamw if self._decoupled else torch_adam
        lr, on_device = options["lr"], False
        if isinstance(lr, Tensor) and not fused:
            # A rate on the card is read there, by the form that a graph can record. The others take numbers.
            on_device = lr.is_cuda
            lr = lr if on_device else float(lr)
        update(
            params,
            [grad.to(param.dtype) for grad, param in zip(gradients, params, strict=True)],
            state["momentum"],
            state["variance"],
            [],
            state["step"],
            foreach=False if fused else options["foreach_adam"],
            fused=fused,
            capturable=on_device,
            amsgrad=False,
            lr=lr,
            beta1=options["beta1"],
            beta2=options["beta2"],
            weight_decay=options["weight_decay"],
            eps=options["epsilon"],
            maximize=False,
        )
        for param, old, momentum in zip(params, before, state["momentum"], strict=False):
            # The kernel decayed everywhere: give back what cautious decay (arXiv 2510.12402) leaves alone.
            undecayed = torch.where(momentum * old > 0, 0, old)
            param.add_(undecayed * (options["lr"] * options["weight_decay"]))


@register_muon_algorithm
class Adam(AdamW):
    """Adam (arXiv 1412.6980): weight decay is added to the gradient; bit-equal to `torch.optim.Adam(fused=True)`."""

    name: ClassVar[str] = "adam"
    _decoupled: ClassVar[bool] = False


@register_muon_algorithm
class Lion(ElementwiseAlgorithm):
    """Lion (arXiv 2302.06675): U = sign(b1 M + (1 - b1) G); M <- b2 M + (1 - b2) G; W <- W - lr wd W - lr U."""

    name: ClassVar[str] = "lion"
    options: ClassVar[Mapping[str, Any]] = {"cautious_wd": False}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {"momentum": BufferSpec(like="grad")}

    def update(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: Mapping[str, list[Tensor]],
        options: Mapping[str, Any],
    ) -> None:
        """See `ElementwiseAlgorithm.update`; state holds the momentum."""
        lr, weight_decay = options["lr"], options["weight_decay"]
        for param, grad, momentum in zip(params, gradients, state["momentum"], strict=True):
            grad = grad.to(momentum.dtype)
            sign = momentum.lerp(grad, 1 - options["beta1"]).sign_()
            momentum.lerp_(grad, 1 - options["beta2"])
            if options["cautious_wd"]:
                param.sub_(torch.where(sign * param > 0, param, 0) * (lr * weight_decay))
            else:
                param.mul_(1 - lr * weight_decay)
            if isinstance(lr, Tensor):
                param.sub_(sign * lr)
            else:
                param.add_(sign, alpha=-lr)
