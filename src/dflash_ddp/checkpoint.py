"""Checkpoints: a native drafter folder and the trainer's state, complete or not there at all.

    checkpoints/step_00000100/config.json, model.safetensors     the drafter, ready to serve
                              trainer.safetensors                fp32 masters and AdamW's moments
                              trainer.json                       step, tokens, fingerprint

A checkpoint is written into a hidden folder beside its place, flushed to disk and renamed. So a folder with a
step's name is complete, whatever moment the process died at; leftovers are removed by the next run.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dflash_ddp.config import ConfigError
from dflash_ddp.native import save_native

STATE_FILE, TENSORS_FILE = "trainer.json", "trainer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a run needs beside tensors to go on.

    Attributes:
        step: optimizer steps that are complete.
        tokens: tokens trained on.
        fingerprint: settings and data that must not change; see `differences`.
    """

    step: int
    tokens: int
    fingerprint: dict[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return checkpoints / f"step_{step:08d}"


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if _STEP_NAME.fullmatch(p.name) and p.is_dir())


def remove_leftovers(checkpoints: Path) -> None:
    """Delete what a killed save left behind."""
    for folder in checkpoints.glob(".tmp-*"):
        shutil.rmtree(folder)


def save_checkpoint(
    checkpoints: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    *,
    native_config: dict[str, Any],
    dtype: torch.dtype,
    keep_last: int,
) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep_last`; the folder written.

    Args:
        checkpoints: the run's folder of checkpoints.
        model: the bare drafter.
        optimizer: its AdamW.
        state: see `TrainerState`.
        native_config: config.json of the drafter.
        dtype: of the drafter's stored weights; masters are fp32.
        keep_last: newest checkpoints kept.
    """
    place = step_folder(checkpoints, state.step)
    work = checkpoints / f".tmp-{place.name}"
    work.mkdir(parents=True)
    save_native(work, model.state_dict(), native_config, dtype)
    tensors = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        tensors[f"master.{name}"] = parameter.detach().to("cpu", copy=True)
        for moment in _MOMENTS:
            value = moments.get(moment, torch.zeros_like(parameter))
            tensors[f"{moment}.{name}"] = value.detach().to("cpu", copy=True)
    save_file(tensors, work / TENSORS_FILE)
    (work / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    for file in work.iterdir():
        _flush(file)
    _flush(work)
    if place.exists():
        shutil.rmtree(place)
    work.rename(place)
    _flush(checkpoints)
    for old in complete_checkpoints(checkpoints)[:-keep_last]:
        shutil.rmtree(old)
    return place


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path) -> TrainerState:
    """The state of a checkpoint.

    Raises:
        ConfigError: the folder is no checkpoint.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        raise ConfigError(
            f"resume={folder} is not a checkpoint: it has no {STATE_FILE}. Give a folder like "
            "outputs/<name>/checkpoints/step_00000100"
        )
    return TrainerState(**json.loads(file.read_text(encoding="utf-8")))


def load_tensors(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Put masters and moments back, exactly, on whatever device the model is."""
    tensors = load_file(folder / TENSORS_FILE)
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused"))
        for parameter in group["params"]:
            device = parameter.device if on_device else "cpu"
            count = torch.tensor(float(step), dtype=torch.float32, device=device)
            optimizer.state[parameter] = {"step": count}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.pop(f"master.{name}"))
            for moment in _MOMENTS:
                value = tensors.pop(f"{moment}.{name}").to(parameter.device)
                optimizer.state[parameter][moment] = value
    assert not tensors, f"{folder} has tensors of another drafter: {sorted(tensors)[:3]}"


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed since a checkpoint, one text a key."""
    keys = sorted(saved.keys() | now.keys())
    return [
        f"{key}: {saved.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in keys
        if saved.get(key) != now.get(key)
    ]
