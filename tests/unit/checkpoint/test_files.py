"""Checkpoint folders: atomic replacement, reading that executes nothing, and damage that is told apart."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dmuown
from dmuown.checkpoint import folder as folders
from dmuown.errors import CheckpointError
from tests.unit.checkpoint.training import Net, assert_same, build, optimizer_of, tensors, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int, algorithm: str = "muown") -> tuple[Any, Any, Any]:
    parts = build(algorithm)
    train(*parts, range(steps))
    return parts


# ------------------------------------------------------------------------------ killed in the middle of a save


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(owner: Any, name: str, call: int) -> None:
    real, left = getattr(owner, name), [call]

    def run(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return die() if left[0] == 0 else real(*args, **kwargs)

    setattr(owner, name, run)


def write_half(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2] if path.name == folders.MARKER else content)
    if path.name == folders.MARKER:
        die()


def save_and_die(where: str, target: Path, model: Any, optimizer: Any) -> None:
    """In a process of its own: it dies in the middle of a save."""
    if where == "tensors":
        die_at_call(filesystem, "_write_item", 4)
    elif where == "metadata":
        die_at_call(filesystem.FileSystemWriter, "finish", 1)
    elif where == "marker":
        die_at_call(folders, "write_synced", 1)
    elif where == "half a marker":
        folders.write_synced = write_half
    elif where in ("before renaming", "between renames"):
        die_at_call(Path, "replace", 1 if where == "before renaming" else 2)
    elif where == "before removing":
        die_at_call(shutil, "rmtree", 1)
    dmuown.save_checkpoint(target, model, optimizer, extra={"steps": 2})


@pytest.mark.parametrize(
    "where, survivor",
    [
        ("tensors", 1),
        ("metadata", 1),
        ("marker", 1),
        ("half a marker", 1),
        ("before renaming", 1),
        ("between renames", 2),
        ("before removing", 2),
    ],
)
def test_a_process_killed_in_a_save_leaves_a_checkpoint(where: str, survivor: int, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    model, optimizer, scheduler = trained(1)
    dmuown.save_checkpoint(target, model, optimizer, extra={"steps": 1})
    train(model, optimizer, scheduler, range(1, 2))
    process = multiprocessing.get_context("fork").Process(
        target=save_and_die, args=(where, target, model, optimizer), daemon=True
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "nothing was under way"
    expected, new = trained(survivor), build("muown", seed=1)
    assert dmuown.load_checkpoint(target, new[0], new[1]) == {"steps": survivor}
    assert_same(tensors(*expected[:2]), tensors(*new[:2]))
    # The next save starts from what is left, and leaves nothing else behind.
    dmuown.save_checkpoint(target, new[0], new[1], extra={"steps": 3})
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]
    assert dmuown.load_checkpoint(target, new[0], new[1]) == {"steps": 3}


def test_everything_is_synced_before_the_marker_and_the_marker_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append(f"{self.name} -> {Path(target).name}")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra={"a": 1})
    marker, renamed = events.index("sync complete.json"), events.index(".c.saving -> c")
    assert {"sync __0_0.distcp", "sync extra.pt"} <= set(events[:marker])
    assert any(event.startswith("sync .metadata") for event in events[:marker])
    assert marker < events.index("sync .c.saving") < renamed < events.index(f"sync {tmp_path.name}")


# ------------------------------------------------------------------------------ damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained(1)
    for step, name in enumerate(("__0_0.distcp", ".metadata", "extra.pt"), start=1):
        dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra={"a": 1})
        truncate(tmp_path / "c" / name)
        train(model, optimizer, scheduler, range(step, step + 1))
        before = tensors(model, optimizer)
        with pytest.raises(CheckpointError, match=rf"{name}: is truncated or changed: \d+ bytes of \d+"):
            dmuown.load_checkpoint(tmp_path / "c", model, optimizer)
        # Without the marker's list of sizes, reading itself finds it.
        (tmp_path / "c" / "complete.json").unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)
        if name != "__0_0.distcp":
            assert_same(before, tensors(model, optimizer))
        shutil.rmtree(tmp_path / "c")  # without its marker it would not be replaced


def test_missing_files_are_named(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        dmuown.load_checkpoint(tmp_path / "nowhere", model, optimizer)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    (tmp_path / "c" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: is missing"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer)
    (tmp_path / "c" / "complete.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"complete\.json: cannot be read"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer)
    (tmp_path / "c" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="was not finished, or not written by dmuown"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer)
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no \.metadata"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, scheduler = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra={"steps": 1})

    def full_disk(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(folders, "write_synced", full_disk)
    train(model, optimizer, scheduler, range(1, 2))
    with pytest.raises(CheckpointError, match=r"complete\.json: could not be written: No space left"):
        dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra={"steps": 2})
    assert dmuown.load_checkpoint(tmp_path / "c", model, optimizer) == {"steps": 1}


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", [".", "results", "results/notes.txt", "link", "other tools", "finished, and more"])
def test_only_an_empty_folder_or_a_checkpoint_is_replaced(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save into a working folder moved it aside, took its name, and deleted all that it held."""
    model, optimizer, _ = trained(1)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/notes.txt").write_text("weeks of work")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "other tools").mkdir()
    (tmp_path / "other tools/.metadata").write_bytes(b"theirs")
    (tmp_path / "other tools/__0_0.distcp").write_bytes(b"theirs")
    dmuown.save_checkpoint(tmp_path / "finished, and more", model, optimizer)
    (tmp_path / "finished, and more/remarks.md").write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"would be replaced"):
        dmuown.save_checkpoint(where, model, optimizer)
    assert everything_in(tmp_path) == before
    dmuown.save_checkpoint("empty", model, optimizer)
    dmuown.save_checkpoint("empty", model, optimizer)


@pytest.mark.parametrize("name", [".c.saving", ".c.previous"])
def test_what_is_no_unfinished_save_is_left_alone(name: str, tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    (tmp_path / name / "mine").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: holds 'mine'"):
        dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    assert (tmp_path / name / "mine").is_dir()


def test_optimizers_are_saved_from_a_generator_and_not_without_their_model(tmp_path: Path) -> None:
    model, optimizer, _ = trained(2)
    saved = [value.clone() for value in tensors(model, optimizer)]
    dmuown.save_checkpoint(tmp_path / "c", model, (one for one in [optimizer]))
    other, new, _ = build("muown", seed=1)
    dmuown.load_checkpoint(tmp_path / "c", other, new)
    assert_same(saved, tensors(other, new))
    with pytest.raises(CheckpointError, match="model: is needed to name the parameters of optimizers"):
        dmuown.save_checkpoint(tmp_path / "d", None, optimizer)
    assert not (tmp_path / "d").exists()


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: Path) -> None:
    """They subclass Python's, and name NumPy's classes when pickled, which no safe loader takes."""
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    model, optimizer, _ = trained(1)
    optimizer.param_groups[0]["lr"] = numpy.float64(0.25)  # as a schedule computes it
    extra = {"loss": numpy.float64(1.5), "all": [numpy.float64(2.0), True, 3]}
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra=extra)
    other, new, _ = build("muown", seed=1)
    assert dmuown.load_checkpoint(tmp_path / "c", other, new) == {"loss": 1.5, "all": [2.0, True, 3]}
    assert type(new.param_groups[0]["lr"]) is float
    assert new.param_groups[0]["lr"] == 0.25
    built = dmuown.Muown([torch.nn.Parameter(torch.ones(2, 2))], lr=numpy.float32(0.5))
    assert type(built.param_groups[0]["lr"]) is float


def test_two_checkpoints_share_no_file(tmp_path: Path) -> None:
    """Megatron-Bridge#2307: a second save overwrote what the first one kept outside of its folder."""
    model, optimizer, scheduler = trained(1)
    dmuown.save_checkpoint(tmp_path / "first", model, optimizer)
    kept = [value.clone() for value in tensors(model, optimizer)]
    train(model, optimizer, scheduler, range(1, 3))
    dmuown.save_checkpoint(tmp_path / "second", model, optimizer)
    dmuown.load_checkpoint(tmp_path / "first", model, optimizer)
    assert_same(kept, tensors(model, optimizer))
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def test_extra_takes_plain_values_only(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.a: is a PosixPath, not a plain"):
        dmuown.save_checkpoint(tmp_path / "c", extra={"a": Path("b")})
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ other models and optimizers


def narrower(model: Any) -> Any:
    model.outer = torch.nn.Linear(10, 4, bias=False)
    return model


def deeper(model: Any) -> Any:
    model.last = torch.nn.Linear(4, 4)
    return model


def shallower(model: Any) -> Any:
    del model.inner[1]
    return model


@pytest.mark.parametrize(
    "change, message",
    [
        (narrower, r"^outer\.weight: has shape \(5, 10\) in the checkpoint and \(4, 10\) here"),
        (deeper, r"^last\.bias: is not in the checkpoint"),
        (shallower, r"^inner\.1\.bias: is in the checkpoint and not in the model"),
    ],
)
def test_another_model_is_refused_by_name(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    other = change(Net())
    before = tensors(other, optimizer_of(other, "muown"))
    with pytest.raises(CheckpointError, match=message):
        dmuown.load_checkpoint(tmp_path / "c", other, optimizer_of(other, "muown"))
    assert_same(before, tensors(other, optimizer_of(other, "muown")))


def test_another_algorithm_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    other, different, _ = build("muon", seed=1)
    before = tensors(other, different)
    with pytest.raises(CheckpointError, match="written by algorithm 'muown', this group runs 'muon'"):
        dmuown.load_checkpoint(tmp_path / "c", other, different)
    assert_same(before, tensors(other, different))


def test_older_files_are_upgraded(tmp_path: Path) -> None:
    model, optimizer, _ = trained(2)
    state = dmuown.get_optimizer_state_dict(model, optimizer)
    for group in state["param_groups"]:
        del group["state_version"]
    saved = {"model": dmuown.get_model_state_dict(model), "optimizer": state}
    save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    other, new, _ = build("muown", seed=1)
    dmuown.load_checkpoint(tmp_path / "c", other, new, require_complete=False)
    assert_same(tensors(model, optimizer), tensors(other, new))


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    optimizer.param_groups[0]["state_version"] = optimizer.param_groups[1]["state_version"] = 2
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    other, new, _ = build("muown", seed=1)
    with pytest.raises(CheckpointError, match="state_version: the checkpoint has version 2"):
        dmuown.load_checkpoint(tmp_path / "c", other, new)


def test_flattened_folders_of_a_host_are_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model, optimizer, _ = trained(2, "normuown")
    flat = dmuown.get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    save({"model": model.state_dict(), "optimizer": flat}, checkpoint_id=tmp_path / "c", no_dist=True)
    other, new, _ = build("normuown", seed=1)
    dmuown.load_checkpoint(tmp_path / "c", other, new, require_complete=False)
    assert_same(tensors(model, optimizer), tensors(other, new))


def test_read_checkpoint_returns_whole_tensors_and_values(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    read = dmuown.read_checkpoint(tmp_path / "c")
    assert torch.equal(read["model"]["experts"], model.experts)
    state = read["optimizer"]["state"]["outer.weight"]
    assert torch.equal(state["magnitude"], optimizer.state[model.outer.weight]["magnitude"])
    assert read["optimizer"]["param_groups"][0]["params"] == ["experts", "inner.0.weight", "outer.weight"]
    assert read["optimizer"]["param_groups"][1]["lr"] == optimizer.param_groups[1]["lr"]


def test_dcp_reads_what_save_checkpoint_wrote(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    other, new, _ = build("muown", seed=1)
    loaded = {"model": other.state_dict(), "optimizer": dmuown.get_optimizer_state_dict(other, new)}
    load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    other.load_state_dict(loaded["model"])
    dmuown.set_optimizer_state_dict(other, new, loaded["optimizer"])
    assert_same(tensors(model, optimizer), tensors(other, new))


# ------------------------------------------------------------------------------ reading executes nothing


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def test_code_in_metadata_is_not_run(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    metadata = tmp_path / "c" / ".metadata"
    real = pickle.loads(metadata.read_bytes())
    real.planner_data["bomb"] = Bomb(tmp_path / "fired")
    metadata.write_bytes(pickle.dumps(real))
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read: .*is no part of checkpoint metadata"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)
    assert not (tmp_path / "fired").exists()


def test_code_in_a_byte_entry_is_not_run(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    state = dmuown.get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["initial_lr"] = Bomb(tmp_path / "fired")
    saved = {"model": model.state_dict(), "optimizer": state}
    save(saved, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(
        CheckpointError, match=r"optimizer\.param_groups\.0\.initial_lr: cannot be read as plain values"
    ):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)
    assert not (tmp_path / "fired").exists()


def test_code_in_extra_is_not_run(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer, extra={"a": 1})
    stream = io.BytesIO()
    torch.save({"a": Bomb(tmp_path / "fired")}, stream)
    (tmp_path / "c" / "extra.pt").write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match=r"extra\.pt: cannot be read as plain values"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)
    assert not (tmp_path / "fired").exists()


def test_metadata_that_points_outside_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    metadata = tmp_path / "c" / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"points outside the checkpoint: '\.\./\.\./secret'"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)


def test_metadata_of_another_kind_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = trained(1)
    dmuown.save_checkpoint(tmp_path / "c", model, optimizer)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="holds a list, not metadata"):
        dmuown.load_checkpoint(tmp_path / "c", model, optimizer, require_complete=False)
