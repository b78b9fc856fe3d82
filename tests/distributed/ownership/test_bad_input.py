"""What is refused, before anything changes, naming the parameter or option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dmuown
from dmuown.errors import LayoutError, OptionError, OptionTypeError, OwnershipError, ParameterError, PlanMismatchError
from dmuown.ownership import dedicate_params, dedicated_records
from dmuown.ownership.groups import dedicated_param_groups
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import POLICY, Block, batch, build, loss_of
from tests.distributed.ownership.training import assert_nothing_but_homes, mesh_of, trainable


def _selection(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)

    def refuse(error: type[Exception], match: str, **options: Any) -> None:
        model = build()
        before = {name: id(param) for name, param in model.named_parameters()}
        arguments: dict[str, Any] = {"predicate": trainable, "param_policy": POLICY, **options}
        with pytest.raises(error, match=match):
            dedicate_params(model, arguments.pop("mesh", mesh), **arguments)
        assert {name: id(param) for name, param in model.named_parameters()} == before
        assert all(param.untyped_storage().nbytes() for param in model.parameters())

    refuse(OwnershipError, r"predicate: selects none of the \d+ parameters", predicate=lambda name, param: False)
    refuse(OptionTypeError, "predicate: must be a function", predicate=None)
    refuse(OptionTypeError, "mesh: must be a DeviceMesh", mesh=None)
    refuse(OptionError, "prefetch: must be a number", prefetch=-1)
    refuse(OptionTypeError, "reshard_after_forward", reshard_after_forward=1)
    refuse(
        OwnershipError,
        r"lm_head\.weight: is matched by param_policy override 0, but `predicate` leaves it out",
        predicate=lambda name, param: "lm_head" not in name,
        param_policy={
            "overrides": [
                {"name": "lm_head", "set": {"route": "sharded_adamw"}},
                {"name": ["norm", "bias", "embed"], "set": {"route": "adamw"}},
            ]
        },
    )
    refuse(
        OwnershipError,
        r"model\.embed_tokens\.weight: no module that contains it matches hook_boundary_predicate",
        hook_boundary_predicate=lambda module: isinstance(module, Block),
    )
    refuse(
        OwnershipError,
        r"model\.layers\.0\.norm\.weight: has its boundary, by hook_boundary_predicate, at model\.layers, a ModuleList "
        "that is never called",
        hook_boundary_predicate=lambda module: isinstance(module, (nn.ModuleList, nn.Embedding)),
    )
    refuse(
        OwnershipError,
        r"boundary model\.layers\.0: holds parameters of several param_dtypes \(bfloat16, float32\) while "
        r"model\.layers\.0\.up_proj\.weight sets cast_forward_inputs",
        param_policy={
            "defaults": {"route": "adamw", "param_dtype": "bf16"},
            "overrides": [{"name": "up_proj", "set": {"param_dtype": "fp32", "cast_forward_inputs": True}}],
        },
    )
    refuse(
        OwnershipError,
        r"boundary model\.layers\.0: holds parameters of several output_dtypes",
        param_policy={
            "defaults": {"route": "adamw", "output_dtype": "bf16"},
            "overrides": [{"name": "up_proj", "set": {"output_dtype": "fp32"}}],
        },
    )
    refuse(ParameterError, r"model\.layers\.0\.norm\.weight: is a vector on route 'muon'", param_policy=None)
    refuse(
        OptionError,
        "param_policy and route_hint_fn: exclude each other",
        route_hint_fn=lambda name, param: "adamw",
    )
    refuse(OptionError, "route: unknown route 'adam'", param_policy={"defaults": {"route": "adam"}})


def test_selection_and_policy(ranks2: RankPool) -> None:
    ranks2.run(_selection, timeout=180)


def _order(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    sharded = build()
    fully_shard(sharded.model.layers[1], mesh=mesh)
    with pytest.raises(OwnershipError, match=r"model\.layers\.1: is sharded by fully_shard already"):
        dedicate_params(sharded, mesh, predicate=trainable, param_policy=POLICY)
    model = build()
    dedicate_params(model, mesh, predicate=trainable, param_policy=POLICY)
    with pytest.raises(OwnershipError, match="TinyLM: has dedicated parameters already"):
        dedicate_params(model, mesh, predicate=trainable, param_policy=POLICY)
    with pytest.raises(OwnershipError, match="Sequential: has dedicated parameters already"):
        dedicate_params(nn.Sequential(model), mesh, predicate=trainable, param_policy=POLICY)
    with pytest.raises(OwnershipError, match="Block: has dedicated parameters already"):
        dedicate_params(model.model.layers[0], mesh, predicate=trainable, param_policy=POLICY)
    with pytest.raises(OwnershipError, match="is dedicated already, with the policy that was given then"):
        dmuown.param_groups(model, POLICY)
    with pytest.raises(OwnershipError, match="TinyLM: has no dedicated parameters"):
        dmuown.Muown(build())
    assert_nothing_but_homes(model)


def test_call_order(ranks2: RankPool) -> None:
    ranks2.run(_order, timeout=180)


def _groups(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    model = build()
    dedicate_params(model, mesh, predicate=trainable, param_policy=POLICY)
    everything = list(model.parameters())
    with pytest.raises(OwnershipError, match=r"gate_proj\.weight: is whole at rank \d.*dmuon_route asks for 'sharded_"):
        dedicated_param_groups(
            model,
            [
                {"params": [p for n, p in model.named_parameters() if "gate" in n], "dmuon_route": "sharded_adamw"},
                {"params": [p for n, p in model.named_parameters() if "gate" not in n]},
            ],
        )
    with pytest.raises(OwnershipError, match=r"embed_tokens\.weight: lies in shards.*matrix_optimizer asks for 'muon'"):
        dedicated_param_groups(model, [{"params": everything, "matrix_optimizer": "muon"}])
    with pytest.raises(OwnershipError, match=r"lm_head\.weight: is dedicated and takes gradients, but is in no param"):
        dedicated_param_groups(model, [{"params": [p for n, p in model.named_parameters() if "lm_head" not in n]}])
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "lm_head" not in n])
    with pytest.raises(OwnershipError, match=r"lm_head\.weight: is dedicated .* none of the optimizer's param groups"):
        dmuown.summarize_param_groups(model, optimizer)
    # An override between the routes of whole parameters is fine: it changes who computes, not where it lies.
    groups = dedicated_param_groups(
        model,
        [
            {"params": [p for n, p in model.named_parameters() if "gate" in n], "dmuon_route": "adamw", "lr": 0.5},
            {"params": [p for n, p in model.named_parameters() if "gate" not in n], "lr": 0.25},
        ],
        algorithm="muon",
    )
    assert [(group["dmuon_route"], group["algorithm"], group["lr"], len(group["params"])) for group in groups] == [
        ("adamw", "adamw", 0.5, 3),
        ("muon", "muon", 0.25, 6),
        ("adamw", "adamw", 0.25, 7),
        ("sharded_adamw", "adamw", 0.25, 2),
    ]
    names = [group["param_names"] for group in groups]
    assert dmuown.Muon(groups).param_groups[1]["param_names"] == names[1]
    assert_nothing_but_homes(model)


def test_group_overrides_after_dedication(ranks2: RankPool) -> None:
    ranks2.run(_groups, timeout=180)


def _left_out(rank: int, world_size: int) -> None:
    """An optimizer without its parameters is refused, whatever it is built from."""
    model = build()
    before = dict(model.named_parameters())
    early = dmuown.Muon(list(model.parameters()), algorithm="adamw")
    stranger = nn.Parameter(torch.zeros(3))
    dedicate_params(model, mesh_of(world_size), predicate=trainable, param_policy=POLICY)
    named = dict(model.named_parameters())

    def refuse(match: str, params: Any, **options: Any) -> None:
        with pytest.raises(OwnershipError, match=match):
            dmuown.Muon(params, algorithm="adamw", **options)

    norms = {name: param for name, param in named.items() if "norm" in name}
    without = [param for name, param in named.items() if name not in norms]
    absent = (
        r"model\.layers\.0\.norm\.weight: is dedicated and takes gradients, but is in no param group "
        r"\(4 such parameters: "
        r"model\.layers\.1\.norm\.weight, model\.layers\.2\.norm\.weight, model\.norm\.weight\)"
    )
    refuse(absent, without)
    refuse(absent, [{"params": [param]} for param in without])
    refuse(absent, [(name, param) for name, param in named.items() if name not in norms])
    refuse(absent, [{"params": iter(without)}, {"params": stranger}])
    # Frozen ones need no optimizer.
    for param in norms.values():
        param.requires_grad_(False)
    dmuown.Muon(without, algorithm="adamw")
    for param in norms.values():
        param.requires_grad_(True)
    # Two optimizers share a model if they say so.
    parts = [
        dmuown.Muon(without, algorithm="adamw", partial=True),
        dmuown.Muown(list(norms.values()), algorithm="adamw", partial=True),
    ]
    for optimizer in parts:
        for name, record in dedicated_records(model).items():
            here = any(param is record.home for group in optimizer.param_groups for param in group["params"])
            assert here == ((name in norms) == (optimizer is parts[1]))
    with pytest.raises(OptionTypeError, match="partial: must be True or False"):
        dmuown.Muon(without, partial="yes")
    # Parameters of the time before: shards took the place of some, others are elsewhere.
    refuse(
        r"model\.embed_tokens\.weight: was replaced in its model by dedicate_params",
        list(before.values()),
        partial=True,
    )
    refuse("is dedicated and takes gradients, but is in no param group", list(before.values()))
    loss_of(model, batch(0, rank)).backward()
    with pytest.raises(OwnershipError, match=r"embed_tokens\.weight: was dedicated after this optimizer was built"):
        early.step()
    # Another model's dedication is none of its business.
    alone = dmuown.Muon([nn.Parameter(torch.zeros(3))], algorithm="adamw")
    other = build()
    dedicate_params(other, mesh_of(world_size), predicate=trainable, param_policy=POLICY)
    alone.step()
    mine, theirs = list(model.parameters()), list(other.parameters())
    dmuown.Muon(mine, algorithm="adamw").step()
    dmuown.Muon([*mine, *theirs], algorithm="adamw")
    with pytest.raises(OwnershipError, match="is in no param group"):
        dmuown.Muon([*mine, *theirs[:-1]], algorithm="adamw")
    assert_nothing_but_homes(model)


def test_an_optimizer_without_its_parameters(ranks2: RankPool) -> None:
    ranks2.run(_left_out, timeout=180)


def _meshes(rank: int, world_size: int) -> None:
    def refuse(match: str, mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> None:
        with pytest.raises(LayoutError, match=match):
            dedicate_params(model or build(), mesh, predicate=trainable, param_policy=POLICY, **options)

    two_d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    refuse("the replicate dimension comes first", swapped)
    refuse("the replicate dimension comes first", two_d["replicate"], replicate_mesh=two_d["shard"])
    refuse("the replicate dimension comes first", swapped["shard"], replicate_mesh=swapped["replicate"])
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))  # the same on every rank, as meshes are
    refuse("has 2 ranks of a world of 4", half)
    refuse("must be a named 1-D slice", mesh_of(4), replicate_mesh=init_device_mesh("cpu", (2, 2)))
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    refuse("has 3 dimensions", three)
    # Tensor parallelism.
    with_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    unnamed = init_device_mesh("cpu", (4,))
    refuse("needs dimension names where parameters are tensor-parallel", unnamed, _tensor_parallel(with_tp))
    refuse("holds all ranks", mesh_of(4), _tensor_parallel(with_tp))
    refuse(
        r"gate_proj\.weight: is a DTensor over mesh dimensions \('tp',\), which are not apart",
        with_tp["tp"],
        _tensor_parallel(with_tp),
    )


def _tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = build(layers=1)
    linear = model.model.layers[0].get_submodule("gate_proj")
    linear.weight = nn.Parameter(distribute_tensor(linear.get_parameter("weight").detach(), mesh["tp"], [Shard(0)]))
    return model


def test_meshes(ranks4: RankPool) -> None:
    ranks4.run(_meshes, timeout=180)


def _disagreeing(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    with pytest.raises(PlanMismatchError, match=r"rank 1: would communicate something else than rank 0"):
        dedicate_params(build(layers=2 + rank), mesh, predicate=trainable, param_policy=POLICY)
    with pytest.raises(PlanMismatchError, match=r"rank 1: would communicate"):
        dedicate_params(
            build(),
            mesh,
            predicate=trainable,
            param_policy={**POLICY, "defaults": {"param_dtype": "bf16" if rank else "fp32"}},
        )


def test_ranks_that_disagree(ranks2: RankPool) -> None:
    ranks2.run(_disagreeing, timeout=180)


def test_without_a_process_group() -> None:
    with pytest.raises(OwnershipError, match="dedicate_params: needs a process group"):
        dedicate_params(build(), None, predicate=trainable)  # type: ignore[arg-type]
