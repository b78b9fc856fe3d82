"""State dicts on ranks: full and sharded, from rank 0 to all, through torch's functions, and faults while saving."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dmuown
from dmuown.checkpoint import folder as folders
from dmuown.errors import CheckpointError
from tests.distributed.checkpoint import layouts
from tests.distributed.harness import RankPool, RanksFailed, run_ranks
from tests.unit.checkpoint.training import optimizer_of

LAYOUTS = ("fsdp", "columns", "fsdp_tp", "hsdp", "tp")


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def _pair(layout: str, world_size: int, algorithm: str = "normuown") -> tuple[Any, Any, Any, Any]:
    model, optimizer = layouts.build(algorithm, layout, 0, world_size)
    layouts.train(model, optimizer, range(2))
    return model, optimizer, *layouts.build(algorithm, layout, 1, world_size)


def _through_full_state(rank: int, world_size: int, flat: bool) -> list[str]:
    """Full state equals the gathered one; it loads on every rank, and from rank 0 alone."""
    different = []
    for layout in LAYOUTS:
        model, optimizer, other, new = _pair(layout, world_size)
        expected = layouts.whole(model, optimizer)
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        state = dmuown.get_optimizer_state_dict(model, optimizer, options=options)
        weights = dmuown.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        found = {
            f"state.{fqn}.{key}": value for fqn, bufs in state.get("state", {}).items() for key, value in bufs.items()
        }
        for key, value in (state if flat else found).items():
            if key.startswith("state."):
                assert torch.equal(value, expected[key.removeprefix("state.")]), key
        dmuown.set_model_state_dict(other, weights, options=StateDictOptions(full_state_dict=True))
        dmuown.set_optimizer_state_dict(other, new, state, options=options)
        different += [f"{layout} all {key}" for key in _differences(expected, layouts.whole(other, new))]

        other, new = layouts.build("normuown", layout, 2, world_size)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=flat)
        state = dmuown.get_optimizer_state_dict(model, optimizer, options=options)
        assert bool(state) == (rank == 0)
        send = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dmuown.set_model_state_dict(other, weights if rank == 0 else {}, options=send)
        dmuown.set_optimizer_state_dict(other, new, state, options=send)
        different += [f"{layout} rank 0 {key}" for key in _differences(expected, layouts.whole(other, new))]
    return different


@pytest.mark.parametrize("flat", [False, True])
def test_full_state_loads_on_all_ranks_and_from_rank_0(flat: bool, ranks4: RankPool) -> None:
    assert ranks4.run(_through_full_state, flat, timeout=120) == [[]] * 4


def _through_torch(rank: int, world_size: int, folder: Path, flat: bool) -> list[str]:
    """torch's functions with DCP between them, as hosts do it; no step is taken to make state."""
    different = []
    for layout in LAYOUTS:
        model, optimizer, other, new = _pair(layout, world_size)
        expected = layouts.whole(model, optimizer)
        new.step = lambda *_, **__: pytest.fail("a step was taken to make state")
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state: Any = {
            "model": torch_state_dict.get_model_state_dict(model),
            "optim": torch_state_dict.get_optimizer_state_dict(model, optimizer, options=options),
        }
        save(state, checkpoint_id=folder / layout)
        loaded: Any = {
            "model": torch_state_dict.get_model_state_dict(other),
            "optim": torch_state_dict.get_optimizer_state_dict(other, new, options=options),
        }
        load(loaded, checkpoint_id=folder / layout)
        torch_state_dict.set_model_state_dict(other, loaded["model"])
        torch_state_dict.set_optimizer_state_dict(other, new, loaded["optim"], options=options)
        different += [f"{layout} {key}" for key in _differences(expected, layouts.whole(other, new))]
    return different


@pytest.mark.parametrize("flat", [False, True])
def test_torchs_functions_and_dcp(flat: bool, ranks4: RankPool, tmp_path: Path) -> None:
    assert ranks4.run(_through_torch, tmp_path, flat, timeout=120) == [[]] * 4


def _sharded_sizes(rank: int, world_size: int) -> list[str]:
    """Sharded state is live, and rows are replicated over the ranks that share them only."""
    wrong = []
    for layout in LAYOUTS:
        model, optimizer = layouts.build("normuown", layout, 0, world_size)
        state = dmuown.get_optimizer_state_dict(model, optimizer)["state"]
        for name, param in model.named_parameters():
            for key, value in state[name].items():
                if value is not optimizer.state[param][key]:
                    wrong.append(f"{layout} {name} {key} is a copy")
                if key.startswith("magnitude") and isinstance(param, DTensor):
                    rows = param.to_local().shape[-2]
                    if value.to_local().shape[-2:] != (rows, 1) or value.shape[-2:] != (param.shape[-2], 1):
                        wrong.append(f"{layout} {name} {key} {value.to_local().shape} {value.shape}")
    return wrong


def test_sharded_state_is_live_and_sharded(ranks4: RankPool) -> None:
    assert ranks4.run(_sharded_sizes) == [[]] * 4


def _across_meshes(rank: int, world_size: int) -> list[str]:
    """DTensors of one layout load into another one directly."""
    different = []
    for source, target in (
        ("fsdp", "tp"),
        ("fsdp_tp", "hsdp"),
        ("columns", "ep_fsdp"),
        ("tp", "plain"),
        ("plain", "fsdp_tp"),
    ):
        model, optimizer = layouts.build("normuown", source, 0, world_size)
        layouts.train(model, optimizer, range(2))
        other, new = layouts.build("normuown", target, 1, world_size)
        dmuown.set_optimizer_state_dict(other, new, dmuown.get_optimizer_state_dict(model, optimizer))
        expected, found = layouts.whole(model, optimizer), layouts.whole(other, new)
        weights = dict(model.named_parameters())
        different += [f"{source} {target} {key}" for key in _differences(expected, found) if key not in weights]
    return different


def test_state_loads_across_meshes(ranks4: RankPool) -> None:
    assert ranks4.run(_across_meshes, timeout=120) == [[]] * 4


def _data_parallel(rank: int, world_size: int, folder: Path) -> list[str]:
    model, _ = layouts.build("muown", "plain", 0, world_size)
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped, "muown")
    wrapped(torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    optimizer.step()
    dmuown.save_checkpoint(folder / "ddp", wrapped, optimizer)
    names = sorted(dmuown.get_model_state_dict(wrapped))
    assert names == sorted(dmuown.get_optimizer_state_dict(wrapped, optimizer)["state"])
    assert not any(name.startswith("module.") for name in names)
    bare, new = layouts.build("muown", "plain", 1, world_size)
    dmuown.load_checkpoint(folder / "ddp", bare, new)
    new.load_state_dict(optimizer.state_dict())
    return _differences(layouts.whole(model, optimizer), layouts.whole(bare, new))


def test_names_have_no_prefix_of_ddp(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_data_parallel, tmp_path) == [[]] * 2


# ------------------------------------------------------------------------------ faults


def _save_then_die(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = layouts.build("muown", "fsdp", 0, world_size)
    layouts.train(model, optimizer, range(1))
    dmuown.save_checkpoint(folder, model, optimizer, extra={"steps": 1})
    layouts.train(model, optimizer, range(1, 2))
    if rank == 1:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    dmuown.save_checkpoint(folder, model, optimizer, extra={"steps": 2})


def test_a_rank_killed_in_a_save_leaves_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="signal SIGKILL"):
        run_ranks(2, _save_then_die, tmp_path / "c")
    model, optimizer = layouts.build("muown", "plain", 1, 1)
    assert dmuown.load_checkpoint(tmp_path / "c", model, optimizer) == {"steps": 1}
    expected, other = layouts.build("muown", "plain", 0, 1)
    layouts.train(expected, other, range(1))
    for one, two in zip(layouts.whole(expected, other).values(), layouts.whole(model, optimizer).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def _fail_to_write(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optimizer = layouts.build("muon", "fsdp", 0, world_size)
    dmuown.save_checkpoint(folder, model, optimizer, extra={"steps": 1})
    messages = []
    real = folders.write_synced

    def full_disk(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    folders.write_synced = full_disk
    try:
        dmuown.save_checkpoint(folder, model, optimizer, extra={"steps": 2})
    except CheckpointError as error:
        messages.append(str(error))
    finally:
        folders.write_synced = real
    messages.append(str(dmuown.load_checkpoint(folder, model, optimizer)))
    return messages


def test_a_failed_write_is_an_error_on_every_rank(ranks2: RankPool, tmp_path: Path) -> None:
    for messages in ranks2.run(_fail_to_write, tmp_path / "c"):
        assert "No space left on device" in messages[0]
        assert messages[1] == "{'steps': 1}"


def _load_damaged(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optimizer = layouts.build("muon", "fsdp", 0, world_size)
    dmuown.save_checkpoint(folder, model, optimizer)
    dist.barrier()
    if rank == 0:
        victim = folder / "__1_0.distcp"
        victim.write_bytes(victim.read_bytes()[:-5])
    dist.barrier()
    messages = []
    for complete in (True, False):
        try:
            dmuown.load_checkpoint(folder, model, optimizer, require_complete=complete)
        except CheckpointError as error:
            messages.append(str(error))
    other, new = layouts.build("muown", "fsdp", 1, world_size)
    try:
        dmuown.load_checkpoint(folder, other, new, require_complete=False)
    except CheckpointError as error:
        messages.append(str(error))
    return messages


def test_damage_is_an_error_on_every_rank(ranks2: RankPool, tmp_path: Path) -> None:
    for messages in ranks2.run(_load_damaged, tmp_path / "c"):
        assert "__1_0.distcp: is truncated or changed" in messages[0]
        assert "truncated or damaged: use an earlier one" in messages[1]
        assert "written by algorithm 'muon', this group runs 'muown'" in messages[2]


def _mesh_of_one(rank: int, world_size: int, folder: Path) -> list[str]:
    """A mesh dimension of size 1 is none."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    results = []
    for seed in (0, 1):
        model = layouts.model_in("plain", seed, world_size)
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model, "muown")
        if seed == 0:
            layouts.train(model, optimizer, range(2))
            dmuown.save_checkpoint(folder, model, optimizer)
        else:
            dmuown.load_checkpoint(folder, model, optimizer)
        results.append(layouts.whole(model, optimizer))
    return _differences(*results)


def test_a_mesh_dimension_of_size_1(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_mesh_of_one, tmp_path / "c") == [[]] * 2
