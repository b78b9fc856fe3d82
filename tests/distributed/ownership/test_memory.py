"""What is whole when: boundaries come and go within a pass, one ahead, and reductions are bounded."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from dmuown.errors import OwnershipError
from dmuown.ownership import OwnershipPlan, dedicated_records, runtime_of
from dmuown.ownership.record import GradState, State
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch as batch_of
from tests.distributed.ownership.models import build, loss_of
from tests.distributed.ownership.training import assert_nothing_but_homes, dedicated, mesh_of


def _states(model: nn.Module, plan: OwnershipPlan) -> list[str]:
    """The state of each boundary in forward order: whole, fetching, or home; most advanced of its transfers."""
    found = []
    for boundary in plan.boundaries:
        states = {buffer.state for buffer in runtime_of(model).buffers if boundary.index in buffer.transfer.boundaries}
        found.append("whole" if State.WHOLE in states else "coming" if State.FETCHING in states else "home")
    return found


def _whole_bytes(model: nn.Module) -> int:
    """Bytes of whole parameters and of gradients under way on this rank."""
    total = 0
    for buffer in runtime_of(model).buffers:
        for tensor in (buffer._flat, buffer._grads, buffer._reduced):
            total += tensor.untyped_storage().nbytes() if tensor is not None else 0
    return total


def _watch(rank: int, world_size: int, prefetch: int, reshard: bool) -> dict[str, Any]:
    model = build(layers=4)
    plan = dedicated(
        model, mesh_of(world_size), param_policy=None, param_policy_fn=_by_shape, prefetch=prefetch,
        reshard_after_forward=reshard,
    )  # fmt: skip
    seen: dict[str, Any] = {"names": [boundary.name for boundary in plan.boundaries], "backward_bytes": []}

    def watch_forward(module: nn.Module, args: Any) -> None:
        seen["forward"] = _states(model, plan)

    def watch_backward(grad: Tensor) -> None:
        seen.setdefault("backward", _states(model, plan))

    def watch_bytes(grad: Tensor) -> None:
        seen["backward_bytes"].append(_whole_bytes(model))
        reducing = [buffer for buffer in runtime_of(model).buffers if buffer.grad_state is GradState.REDUCING]
        assert len(reducing) <= 2

    # Inside layer 1's forward, and inside layer 2's backward, between its boundary's hooks.
    model.model.layers[1].get_submodule("norm").register_forward_pre_hook(watch_forward)
    for index, layer in enumerate(model.model.layers):
        norm = layer.get_submodule("norm")
        if index == 2:
            norm.register_forward_hook(lambda module, args, output: output.register_hook(watch_backward) and None)
        norm.register_forward_hook(lambda module, args, output: output.register_hook(watch_bytes) and None)
    loss_of(model, batch_of(0, rank)).backward()
    seen["total_bytes"] = sum(transfer.fetch_bytes for transfer in plan.transfers)
    assert_nothing_but_homes(model)
    return seen


def _by_shape(name: str, param: nn.Parameter) -> dict[str, Any]:
    return {"route": "adamw" if param.ndim < 2 else "muon"}


def test_one_boundary_ahead(ranks2: RankPool) -> None:
    for seen in ranks2.run(_watch, 1, True, timeout=180):
        assert seen["names"] == [
            "model.embed_tokens",
            *(f"model.layers.{i}" for i in range(4)),
            "model.norm",
            "lm_head",
        ]
        assert seen["forward"] == ["home", "home", "whole", "coming", "home", "home", "home"]
        assert seen["backward"] == ["home", "home", "coming", "whole", "home", "home", "home"]
        assert max(seen["backward_bytes"]) < seen["total_bytes"]


def test_without_prefetch(ranks2: RankPool) -> None:
    for seen in ranks2.run(_watch, 0, True, timeout=180):
        assert seen["forward"] == ["home", "home", "whole", "home", "home", "home", "home"]
        assert seen["backward"] == ["home", "home", "home", "whole", "home", "home", "home"]


def test_kept_after_forward(ranks2: RankPool) -> None:
    for seen in ranks2.run(_watch, 1, False, timeout=180):
        assert seen["forward"] == ["whole", "whole", "whole", "coming", "home", "home", "home"]
        assert seen["backward"] == ["whole", "whole", "whole", "whole", "home", "home", "home"]


def _unannounced(rank: int, world_size: int) -> None:
    """`fully_shard` without `ignored_params` would shard what is elsewhere: it says what to pass."""
    model = build()
    mesh = mesh_of(world_size)
    dedicated(model, mesh, param_policy=None, param_policy_fn=_by_shape)
    assert any(not record.owned for record in dedicated_records(model).values())
    assert_nothing_but_homes(model)
    with pytest.raises(OwnershipError, match=r"ignored_params=dmuown\.dedicated_parameters\(model\)"):
        fully_shard(model, mesh=mesh)


def test_fully_shard_without_ignored_params(ranks2: RankPool) -> None:
    ranks2.run(_unannounced, timeout=180)


@pytest.mark.parametrize("count", [3])
def test_more_ranks_than_parameters_of_a_boundary(count: int) -> None:
    with RankPool(count) as pool:
        for seen in pool.run(_watch, 1, True, timeout=180):
            assert seen["forward"][2] == "whole"
