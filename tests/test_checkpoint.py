"""Checkpoints are complete or absent, exact, and rotate."""

import shutil

import pytest
import torch
from drafters import tiny_drafter, tiny_shape

import dflash_ddp.checkpoint as checkpoint_module
from dflash_ddp.checkpoint import (
    TrainerState,
    complete_checkpoints,
    differences,
    load_tensors,
    read_state,
    remove_leftovers,
    save_checkpoint,
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


def save(folder, model, optimizer, step, keep_last=2):
    state = TrainerState(step, 10 * step, {"seed": 1})
    return save_checkpoint(
        folder, model, optimizer, state, native_config={}, dtype=torch.bfloat16, keep_last=keep_last
    )


def test_round_trip_is_exact_and_goes_on_exactly(tmp_path):
    model, optimizer = trained(1)
    folder = save(tmp_path, model, optimizer, 3)
    other, other_optimizer = trained(2)
    load_tensors(folder, other, other_optimizer, read_state(folder).step)
    for _ in range(2):
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert theirs.dtype == torch.float32
            ours.grad = torch.full_like(ours, 0.3)
            theirs.grad = torch.full_like(theirs, 0.3)
        optimizer.step()
        other_optimizer.step()


def test_a_parameter_without_moments_is_saved_as_zeros(tmp_path):
    model = tiny_drafter(SHAPE)
    optimizer = make_optimizer(model, OptimConfig())
    folder = save(tmp_path, model, optimizer, 1)
    load_tensors(folder, model, optimizer, 1)
    assert all((state["exp_avg"] == 0).all() for state in optimizer.state.values())


def test_rotation_keeps_the_newest(tmp_path):
    model, optimizer = trained(1)
    for step in (1, 2, 10):
        save(tmp_path, model, optimizer, step)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_00000002", "step_00000010"]


@pytest.mark.parametrize("dies_in", ["save_native", "save_file", "_flush"])
def test_a_save_that_dies_leaves_no_checkpoint(tmp_path, monkeypatch, dies_in):
    model, optimizer = trained(1)
    save(tmp_path, model, optimizer, 1)

    def die(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, model, optimizer, 2)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_00000001"]
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    save(tmp_path, model, optimizer, 2)
    assert len(complete_checkpoints(tmp_path)) == 2


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.json"):
        read_state(tmp_path)
    assert complete_checkpoints(tmp_path / "absent") == []
    shutil.rmtree(tmp_path)


def test_differences_name_old_and_new():
    found = differences({"seed": 1, "data": "a", "gone": 2}, {"seed": 2, "data": "a", "new": 3})
    assert found == [
        "gone: 2 in the checkpoint, None now",
        "new: None in the checkpoint, 3 now",
        "seed: 1 in the checkpoint, 2 now",
    ]
