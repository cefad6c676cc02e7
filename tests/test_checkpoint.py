"""Checkpoints are complete or absent, exact, rotate, and survive a kill at any moment and a bad disk."""

import os
import random
import signal
import time

import pytest
import torch
from drafters import tiny_drafter, tiny_shape
from safetensors import safe_open

import dflash_ddp.checkpoint as checkpoint_module
from dflash_ddp.checkpoint import (
    HostCopy,
    TrainerState,
    complete_checkpoints,
    differences,
    first_whole,
    kept_steps,
    load_tensors,
    read_state,
    remove_leftovers,
    rotate,
    step_of,
    write_checkpoint,
)
from dflash_ddp.config import ConfigError, OptimConfig
from dflash_ddp.drafter.optim import make_optimizer

SHAPE = tiny_shape()


def trained(seed):
    model = tiny_drafter(SHAPE, seed=seed)
    optimizer = make_optimizer(model, OptimConfig())
    torch.manual_seed(seed)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, step):
    copy = HostCopy(model, optimizer)
    copy.take()
    state = TrainerState(step, 10 * step, [[0.5]], 0, [(0, 1.0)], {"seed": 1})
    return write_checkpoint(folder, copy.tensors, state, native_config={}, dtype=torch.bfloat16)


def steps_in(folder):
    return [step_of(p) for p in complete_checkpoints(folder)]


def test_round_trip_is_exact_and_goes_on_exactly(tmp_path):
    model, optimizer = trained(1)
    folder = save(tmp_path, model, optimizer, 30)  # the count is AdamW's own, not the name's
    other, other_optimizer = trained(2)
    load_tensors(folder, other, other_optimizer)
    for _ in range(2):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert theirs.dtype == torch.float32
            ours.grad = torch.full_like(ours, 0.3)
            theirs.grad = torch.full_like(theirs, 0.3)
        optimizer.step()
        other_optimizer.step()


def test_files_name_no_device(tmp_path):
    """So what a GPU wrote loads on a CPU: host tensors in safetensors, JSON, and nothing pickled."""
    model, optimizer = trained(1)
    folder = save(tmp_path, model, optimizer, 3)
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    with safe_open(folder / "trainer.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
        assert "cuda" not in str(file.metadata())
    assert "cuda" not in (folder / "trainer.json").read_text()


def test_a_copy_does_not_change_when_training_goes_on(tmp_path):
    model, optimizer = trained(1)
    copy = HostCopy(model, optimizer)
    copy.take()
    before = {name: tensor.clone() for name, tensor in copy.tensors.items()}
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in copy.tensors.items())
    shared = {tensor.data_ptr() for tensor in copy.tensors.values()}
    assert not shared & {parameter.data_ptr() for parameter in model.parameters()}


def test_a_parameter_without_moments_is_saved_as_zeros(tmp_path):
    model = tiny_drafter(SHAPE)
    optimizer = make_optimizer(model, OptimConfig())
    folder = save(tmp_path, model, optimizer, 1)
    load_tensors(folder, model, optimizer)
    assert all((state["exp_avg"] == 0).all() for state in optimizer.state.values())


def test_rotation_keeps_the_newest_the_regular_and_the_best():
    steps = [100, 200, 250, 300, 400, 500, 600]
    assert kept_steps(steps, keep_last=2, keep_every=0, best=None) == {500, 600}
    assert kept_steps(steps, keep_last=1, keep_every=300, best=250) == {250, 300, 600}
    assert kept_steps(steps, keep_last=9, keep_every=0, best=7) == set(steps)


def test_rotation_spares_what_is_being_uploaded(tmp_path):
    model, optimizer = trained(1)
    folders = [save(tmp_path, model, optimizer, step) for step in (1, 2, 10)]
    rotate(tmp_path, {10}, but=folders[0])
    assert steps_in(tmp_path) == [1, 10]


@pytest.mark.parametrize("dies_in", ["save_native", "save_file", "flush", "discard"])
def test_a_save_that_dies_leaves_no_half_checkpoint(tmp_path, monkeypatch, dies_in):
    model, optimizer = trained(1)
    save(tmp_path, model, optimizer, 1)
    if dies_in == "discard":  # of a damaged one, which is replaced
        os.truncate(save(tmp_path, model, optimizer, 2) / "trainer.json", 5)

    def die(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, model, optimizer, 2)
    assert steps_in(tmp_path) == ([1, 2] if dies_in == "discard" else [1])
    remove_leftovers(tmp_path)
    assert not list(tmp_path.glob(".tmp*"))
    assert first_whole([save(tmp_path, model, optimizer, 2)])
    assert steps_in(tmp_path) == [1, 2]


def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    """50 processes save and rotate without pause until SIGKILL."""
    chance = random.Random(0)
    model, optimizer = trained(1)
    save(tmp_path, model, optimizer, 0)
    with_leftovers = 0
    for _ in range(50):
        first = steps_in(tmp_path)[-1]
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            step = first
            while True:
                save(tmp_path, model, optimizer, step)
                rotate(tmp_path, kept_steps(steps_in(tmp_path), keep_last=2, keep_every=7, best=3))
                step += 1
        time.sleep(0.02 + 0.25 * chance.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with_leftovers += any(tmp_path.glob(".tmp-*"))
        remove_leftovers(tmp_path)
        newest = complete_checkpoints(tmp_path)[-1]
        assert first_whole([newest]) == newest
        assert read_state(newest).step == step_of(newest) >= first - 1
        load_tensors(newest, *trained(2))
        assert not [p for p in tmp_path.iterdir() if not p.name.startswith("step_")]
    assert with_leftovers > 5, "the kills did not fall into saves"
    assert steps_in(tmp_path)[-1] > 10


def test_a_part_that_could_not_be_removed_is_in_nobodys_way(tmp_path, monkeypatch):
    model, optimizer = trained(1)

    def fail(*_args, **_kwargs):
        raise OSError("the disk refuses")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "put_in_place", fail)
        patch.setattr(checkpoint_module.shutil, "rmtree", lambda *_, **__: None)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk refuses"):
                save(tmp_path, model, optimizer, 1)
    assert list(tmp_path.glob(".tmp-*"))
    assert first_whole([save(tmp_path, model, optimizer, 1)])
    assert not list(tmp_path.glob(".tmp-*"))


FILES = {"tensors": "trainer.safetensors", "weights": "model.safetensors"}
FILES |= {"state": "trainer.json", "config": "config.json"}


@pytest.mark.parametrize("damage", [f"{kind} {name}" for kind in ("no", "cut") for name in FILES])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog, damage):
    model, optimizer = trained(1)
    older, newer = (save(tmp_path, model, optimizer, step) for step in (1, 2))
    kind, name = damage.split()
    file = newer / FILES[name]
    if kind == "no":
        file.unlink()
    else:
        os.truncate(file, max(1, file.stat().st_size - 9))
    assert first_whole(complete_checkpoints(tmp_path)[::-1]) == older
    assert f"passing over {newer}, which is damaged" in caplog.text


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (None, "no such folder"),
        ([], "it is empty"),
        ([".tmp-step_00000001"], "nothing but parts of saves that were killed"),
        (["step_00000001"], "it has no trainer.json"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path, inside, words):
    folder = tmp_path / "given"
    for name in inside or []:
        (folder / name).mkdir(parents=True)
    if inside == []:
        folder.mkdir()
    with pytest.raises(ConfigError, match=words):
        read_state(folder)
    assert complete_checkpoints(tmp_path / "absent") == []


def test_a_compiled_drafter_has_the_same_names(tmp_path):
    """So a run goes on with the compiler on or off."""
    names = {*HostCopy(*trained(1)).tensors}
    model, optimizer = trained(1)
    model.compile_parts()
    assert {*HostCopy(model, optimizer).tensors} == names


def test_differences_name_old_and_new():
    found = differences({"seed": 1, "data": "a", "gone": 2}, {"seed": 2, "data": "a", "new": 3})
    assert found == [
        "gone: 2 in the checkpoint, None now",
        "new: None in the checkpoint, 3 now",
        "seed: 1 in the checkpoint, 2 now",
    ]
