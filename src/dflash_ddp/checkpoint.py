"""Checkpoints: a native drafter folder and the trainer's state, complete or not there at all.

    checkpoints/step_00000100/config.json, model.safetensors     the drafter, ready to serve
                              trainer.safetensors                fp32 masters and AdamW's moments
                              trainer.json                       step, tokens, fingerprint

A checkpoint is written into a hidden folder beside its place, flushed to disk and renamed; it is renamed again before
it is deleted. So a folder with a step's name is complete, whatever moment the process died at; leftovers are removed
by the next run.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_ddp.config import ConfigError
from dflash_ddp.disk import flush
from dflash_ddp.native import CONFIG_FILE, WEIGHTS_FILE, save_native

logger = logging.getLogger(__name__)

STATE_FILE, TENSORS_FILE = "trainer.json", "trainer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_COUNT = "adamw_steps"  # fewer than the run's where steps were skipped
_STEP_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a run needs beside tensors to go on.

    Attributes:
        step: optimizer steps that are complete.
        tokens: tokens trained on, up to the last row of metrics.
        sums: what each drafter rank has summed since that row.
        bad_steps: steps that were left out so far.
        accept_lengths: (step, held-out accept length) of each evaluation so far.
        fingerprint: settings and data that must not change; see `differences`.
    """

    step: int
    tokens: int
    sums: list[list[float]]
    bad_steps: int
    accept_lengths: list[tuple[int, float | None]]
    fingerprint: dict[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name[-8:])


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.iterdir() if _STEP_NAME.fullmatch(p.name) and p.is_dir())


def first_whole(checkpoints: list[Path]) -> Path | None:
    """The first that can be read to its end; says which ones it passes over.

    A rename makes a folder complete, but a disk may still lose or cut a file.
    """
    for folder in checkpoints:
        try:
            read_state(folder)
            json.loads((folder / CONFIG_FILE).read_bytes())
            for name in (TENSORS_FILE, WEIGHTS_FILE):
                with safe_open(folder / name, "pt"):
                    pass  # a file that ends before the tensors that its header names is refused
        except (ConfigError, ValueError, TypeError, OSError, SafetensorError) as error:
            logger.warning("passing over %s, which is damaged: %s", folder, error)
        else:
            return folder
    return None


def remove_leftovers(checkpoints: Path) -> None:
    """Delete what a killed save or rotation left behind."""
    for folder in checkpoints.glob(".tmp-*"):
        shutil.rmtree(folder)


def discard(folder: Path) -> None:
    """Delete a folder so that, killed at any moment, nobody takes the rest for the whole."""
    aside = folder.with_name(f".tmp-old-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def put_in_place(work: Path, place: Path) -> None:
    """Flush a finished folder to disk and give it its name; what had the name is deleted."""
    for file in work.iterdir():
        flush(file)
    flush(work)
    if place.exists():
        discard(place)
    work.rename(place)
    flush(place.parent)


def kept_steps(steps: list[int], *, keep_last: int, keep_every: int, best: int | None) -> set[int]:
    """Which checkpoints stay: the newest, every so many steps (0: none), and the best."""
    newest = set(sorted(steps)[-keep_last:])
    regular = {step for step in steps if keep_every and step % keep_every == 0}
    return newest | regular | {step for step in steps if step == best}


class HostCopy:
    """Masters, moments and AdamW's count in host memory, pinned beside a GPU.

    The buffers are allocated once: 12 bytes a parameter, and up to twice that where they are pinned:
    torch rounds each pinned buffer up to a power of two.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Allocate; nothing is copied yet."""
        self._model, self._optimizer = model, optimizer
        self._cuda = next(model.parameters()).is_cuda
        self.tensors = {
            f"{kind}.{name}": torch.empty_like(parameter, device="cpu", pin_memory=self._cuda)
            for kind in ("master", *_MOMENTS)
            for name, parameter in model.named_parameters()
        }
        self.tensors[_COUNT] = torch.zeros((), pin_memory=self._cuda)

    @torch.no_grad()
    def take(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """Copy the present state; on a GPU in stream order, between the two events returned.

        So the host does not wait, and the next optimizer step comes after the copy.
        """
        begin = self._mark()
        for name, parameter in self._model.named_parameters():
            state = self._optimizer.state.get(parameter, {})  # empty before the first step
            self.tensors[f"master.{name}"].copy_(parameter, non_blocking=True)
            for moment in _MOMENTS:
                buffer = self.tensors[f"{moment}.{name}"]
                buffer.copy_(state[moment], non_blocking=True) if state else buffer.zero_()
        if state:
            self.tensors[_COUNT].copy_(state["step"], non_blocking=True)
        end = self._mark()
        return None if begin is None or end is None else (begin, end)

    def _mark(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def write_checkpoint(
    checkpoints: Path,
    tensors: dict[str, Tensor],
    state: TrainerState,
    *,
    native_config: dict[str, Any],
    dtype: torch.dtype,
) -> Path:
    """Write a checkpoint, unless a whole one is there; the folder, complete.

    Args:
        checkpoints: the run's folder of checkpoints.
        tensors: of a `HostCopy`.
        state: see `TrainerState`.
        native_config: config.json of the drafter.
        dtype: of the drafter's stored weights; masters are fp32.

    Raises:
        OSError, SafetensorError: the disk is full, or gone, or refuses.
    """
    place = step_folder(checkpoints, state.step)
    if place.exists() and first_whole([place]):
        return place  # of the same run, so it is the same: to replace it could lose both
    work = checkpoints / f".tmp-{place.name}"
    masters = {
        name.removeprefix("master."): tensor
        for name, tensor in tensors.items()
        if name.startswith("master.")
    }
    try:
        # Of an earlier try, on a disk that would not even remove it.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        save_native(work, masters, native_config, dtype)
        save_file(tensors, work / TENSORS_FILE)
        text = json.dumps(asdict(state), indent=2) + "\n"
        (work / STATE_FILE).write_text(text, encoding="utf-8")
        put_in_place(work, place)
    except (OSError, SafetensorError):
        shutil.rmtree(work, ignore_errors=True)  # the disk may be full: leave nothing there
        raise
    return place


def rotate(checkpoints: Path, keep: set[int], *, but: Path | None = None) -> None:
    """Drop the checkpoints that `kept_steps` does not keep, except one that is in use."""
    for folder in complete_checkpoints(checkpoints):
        if step_of(folder) not in keep and folder != but:
            discard(folder)


def read_state(folder: Path) -> TrainerState:
    """The state of a checkpoint.

    Raises:
        ConfigError: the folder is no checkpoint.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        inside = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        why = "there is no such folder" if not folder.is_dir() else f"it has no {STATE_FILE}"
        if folder.is_dir() and not inside:
            why = "it is empty"
        elif inside and all(name.startswith(".tmp-") for name in inside):
            why = "it holds nothing but parts of saves that were killed"
        raise ConfigError(
            f"resume={folder} is not a checkpoint: {why}. Give a folder like "
            "outputs/<name>/checkpoints/step_00000100"
        )
    return TrainerState(**json.loads(file.read_text(encoding="utf-8")))


def load_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put masters, moments and count back, exactly, on whatever device the model is."""
    tensors = load_file(folder / TENSORS_FILE)
    count = tensors.pop(_COUNT)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.pop(f"master.{name}"))
            moments = {m: tensors.pop(f"{m}.{name}").to(parameter.device) for m in _MOMENTS}
            optimizer.state[parameter] = {"step": count.to(parameter.device, copy=True), **moments}
    assert not tensors, f"{folder} has tensors of another drafter: {sorted(tensors)[:3]}"


def state_sum(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """A checksum of masters, moments and count, int64 [1], on the device of the model."""
    parts = [
        tensor.detach().view(torch.int32).sum()
        for parameter in model.parameters()
        for tensor in (parameter, *optimizer.state[parameter].values())
    ]
    return sum(number * part for number, part in enumerate(parts, 1)).reshape(1)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed since a checkpoint, one text a key."""
    keys = sorted(saved.keys() | now.keys())
    return [
        f"{key}: {saved.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in keys
        if saved.get(key) != now.get(key)
    ]
