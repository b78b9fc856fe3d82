"""Third-party algorithms for tests: the specification's extension form, with only its imports changed."""

from __future__ import annotations

import torch

from dmuown import BufferSpec, MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms import orthogonalize_batch, orthogonalize_single


# ruff: noqa: RUF012
@register_muon_algorithm
class MyVariant(MuonAlgorithm):
    name = "my_variant"
    options = {"alpha": 0.5}  # per-group hyperparams and their defaults
    state_spec = {
        "momentum_buffer": BufferSpec(like="grad", signed=True),
        # add extra per-param buffers here ("grad" or "grad_rows" shaped)
        "row_sizes": BufferSpec(like="grad_rows", signed=False),
    }

    def update(self, param, grad, state, lr_ratio, *, lr, alpha, ns_steps,  # type: ignore[no-untyped-def]
               orthogonalization_strategy, split_sizes, **kwargs):  # fmt: skip
        buf = state["momentum_buffer"]
        buf.mul_(alpha).add_(grad)
        state["row_sizes"].mul_(alpha).add_(grad.float().square().sum(-1, keepdim=True).sqrt())
        u = orthogonalize_single(buf, ns_steps=ns_steps, strategy=orthogonalization_strategy, split_sizes=split_sizes)
        param.mul_(1 - lr * kwargs["weight_decay"]).sub_(lr * lr_ratio * u / (1 + state["row_sizes"]))


@register_muon_algorithm
class MyBatchedVariant(MyVariant):
    """The same with a batched form, which overwrites its gradients as such forms do."""

    name = "my_batched_variant"
    batches: list[int] = []

    def foreach_update(self, params, grads, state, lr_ratios, *, lr, alpha, ns_steps,  # type: ignore[no-untyped-def]
                       orthogonalization_strategy, split_sizes, **kwargs):  # fmt: skip
        self.batches.append(len(params))
        torch._foreach_mul_(state["momentum_buffer"], alpha)
        torch._foreach_add_(state["momentum_buffer"], grads)
        for sizes, grad in zip(state["row_sizes"], grads, strict=True):
            sizes.mul_(alpha).add_(grad.float().square().sum(-1, keepdim=True).sqrt())
        torch._foreach_zero_(grads)
        u = orthogonalize_batch(
            state["momentum_buffer"], ns_steps=ns_steps, strategy=orthogonalization_strategy, split_sizes=split_sizes
        )
        for param, update, sizes, ratio in zip(params, u, state["row_sizes"], lr_ratios, strict=True):
            param.mul_(1 - lr * kwargs["weight_decay"]).sub_(lr * ratio * update / (1 + sizes))
