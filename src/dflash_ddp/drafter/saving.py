"""What is saved when: a copy to host memory in the training thread, everything else in a thread of its own.

In: the state of a step. Out: a checkpoint on disk, older ones rotated away, and at the end `export/`. A write that
fails says so and is made good by the next one, unless `checkpoint.on_error` says stop; the last one of a run is tried
again a few times and then ends the run, since nothing comes after it; so is `export/`. The first drafter rank saves.
"""

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from dflash_ddp.checkpoint import (
    HostCopy,
    TrainerState,
    complete_checkpoints,
    kept_steps,
    put_in_place,
    rotate,
    step_folder,
    step_of,
    write_checkpoint,
)
from dflash_ddp.config import OnError
from dflash_ddp.control import Control
from dflash_ddp.disk import flush
from dflash_ddp.log import exit_on_error
from dflash_ddp.metrics_file import METRICS_FILE, heldout_row
from dflash_ddp.model_card import model_card
from dflash_ddp.native import native_config
from dflash_ddp.startup import Run
from dflash_ddp.upload import Uploader

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
"""How often a write that training waits for is told of."""
LAST_TRIES_S = (1.0, 4.0, 10.0)
"""Pauses between the tries to write the last checkpoint of a run, and `export/`."""


def best_step(accept_lengths: dict[int, float | None]) -> int | None:
    """The trained step with the highest held-out accept length, the first of equals."""
    trained = {s: length for s, length in accept_lengths.items() if s and length is not None}
    return max(sorted(trained), key=lambda s: trained[s]) if trained else None


class Saver:
    """Owns the host copy, and at most one write at a time."""

    def __init__(
        self, run: Run, control: Control, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Allocate the host copy."""
        self._run, self._control = run, control
        self._device = next(model.parameters()).device
        self._copy = HostCopy(model, optimizer)
        self._checkpoints = run.folder / "checkpoints"
        self._thread: threading.Thread | None = None
        self._stall_s = 0.0
        self._metrics: deque[dict[str, float]] = deque()  # of the thread that writes
        self._num_failed = 0
        upload = run.config.checkpoint.upload
        self._uploader = None if upload is None else Uploader(upload, control)

    def save(self, state: TrainerState, *, best: int | None, last: bool) -> None:
        """Copy now, write later. Waits only for an earlier write that is not finished.

        Args:
            state: of this step.
            best: the step whose checkpoint is kept in any case.
            last: nothing comes after it.
        """
        start = time.monotonic()
        self.wait()
        events = self._copy.take()
        self._stall_s = time.monotonic() - start
        self._thread = threading.Thread(
            target=self._write,
            args=(state, events, best, last),
            name=f"the checkpoint of step {state.step}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the write in progress has ended; says now and then that training waits for it."""
        start = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(REPORT_EVERY_S)
            if self._thread.is_alive():
                logger.warning(
                    "training has waited %.0f s for %s, whose write is not finished",
                    *(time.monotonic() - start, self._thread.name),
                )

    def metrics(self) -> dict[str, float]:
        """Of the writes that ended since the last call, for the next row."""
        found: dict[str, float] = {}
        while self._metrics:
            found |= self._metrics.popleft()
        return found

    def _write(
        self,
        state: TrainerState,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        best: int | None,
        last: bool,
    ) -> None:
        with exit_on_error(self._control.fail):
            if events is not None:
                begin, end = events
                torch.cuda.set_device(self._device)  # new threads start on device 0
                end.synchronize()
                self._stall_s += begin.elapsed_time(end) / 1000
            start = time.monotonic()
            what = threading.current_thread().name
            folder = self._try(what, partial(self._checkpoint, state), best, last=last)
            if folder is None:
                return
            write_s = time.monotonic() - start
            logger.info(
                "saved %s: training stood still for %.2f s, written in %.2f s",
                *(folder, self._stall_s, write_s),
            )
            self._metrics.append(
                {"checkpoint/stall_s": self._stall_s, "checkpoint/write_s": write_s}
            )
            keep = self._run.config.checkpoint
            self._rotate(best, keep_last=keep.keep_last, keep_every=keep.keep_every)
            if self._uploader is not None:
                self._uploader.offer(folder)

    def _checkpoint(self, state: TrainerState) -> Path:
        run = self._run
        return write_checkpoint(
            self._checkpoints,
            self._copy.tensors,
            state,
            native_config=native_config(
                run.shape, run.spec, run.found.capture_layers, run.drafter_dtype
            ),
            dtype=run.drafter_dtype,
        )

    def _try(
        self, what: str, write: Callable[[], Path], best: int | None, *, last: bool
    ) -> Path | None:
        """What is written; None if it cannot be written and training goes on.

        Raises:
            RuntimeError: training does not go on.
            FolderLostError: the run's folder is another run's.
        """
        run = self._run
        pauses = [*(LAST_TRIES_S if last else ()), None]
        while pauses:
            pause = pauses.pop(0)
            try:
                run.own_folder.keep()
                with suppress(FileNotFoundError):
                    flush(run.folder / METRICS_FILE)  # no resume may find rows missing
                return write()
            except (OSError, SafetensorError) as error:
                self._num_failed += 1
                if "No space left" in str(error) and self._make_room(best):
                    pauses.insert(0, pause)
                    pause = 0.0
                self._metrics.append({"checkpoint/failed": self._num_failed})
                text = f"{what} cannot be written: {error}"
                stops = run.config.checkpoint.on_error is OnError.stop
                if stops or (last and pause is None):
                    raise RuntimeError(text) from error
                then = "at the next one" if pause is None else f"in {pause:.0f} s"
                logger.error("%s; trying again %s", text, then)
                time.sleep(pause or 0)
        return None

    def _make_room(self, best: int | None) -> bool:
        """On a full disk: of the checkpoints only the newest and the best stay. Whether any went."""
        before = len(complete_checkpoints(self._checkpoints))
        self._rotate(best, keep_last=1, keep_every=0)
        if len(complete_checkpoints(self._checkpoints)) == before:
            return False
        logger.warning(
            "%s has no space for checkpoint.keep_last=%d and one more: older ones are deleted",
            *(self._checkpoints, self._run.config.checkpoint.keep_last),
        )
        return True

    def _rotate(self, best: int | None, *, keep_last: int, keep_every: int) -> None:
        uploading = self._uploader.busy if self._uploader is not None else None
        try:
            steps = [step_of(folder) for folder in complete_checkpoints(self._checkpoints)]
            keep = kept_steps(steps, keep_last=keep_last, keep_every=keep_every, best=best)
            rotate(self._checkpoints, keep, but=uploading)
        except OSError as error:
            logger.error("old checkpoints cannot be deleted: %s", error)

    def finish(self, step: int, best: int | None) -> int | None:
        """Write `export/`; the step of the drafter in it, None before any.

        Args:
            step: the last one saved.
            best: the step wanted; None: the last.
        """
        self.wait()
        self._run.own_folder.check()
        exported = next(
            (s for s in (best, step) if s and step_folder(self._checkpoints, s).is_dir()), None
        )
        if exported is None:
            return None
        if best not in (None, exported):
            logger.warning("the checkpoint of the best step %d is gone", best)
        self._try("export/", partial(self._export, exported), best, last=True)
        return exported

    def _export(self, step: int) -> Path:
        run, place = self._run, self._run.folder / "export"
        work = place.with_name(".tmp-export")
        shutil.rmtree(work, ignore_errors=True)
        checkpoint = step_folder(self._checkpoints, step)
        card = model_card(
            run.config, run.shape, step=step, heldout=heldout_row(run.folder, step), form="native"
        )
        try:
            shutil.copytree(checkpoint, work, ignore=shutil.ignore_patterns("trainer.*"))
            (work / "README.md").write_text(card, encoding="utf-8")
            put_in_place(work, place)
        except OSError:
            shutil.rmtree(work, ignore_errors=True)  # failure.json may need the room
            raise
        return place

    def upload_rest(self, *, stopped: bool) -> None:
        """Wait for uploads, of `export/` too; it may take long, or be cut short: nothing is due after it."""
        export = self._run.folder / "export"
        if self._uploader is not None and export.is_dir():
            self._uploader.close(export, stopped=stopped)
