"""What ends a run early or saves out of turn, and how the drafter ranks agree on the step.

    SIGTERM, SIGINT, SIGHUP   finish the step, save, end with exit code 0; a second one ends at once
    SIGUSR1                   save after the step and go on
    max_hours                 like SIGTERM

Any rank may be told, one or all of them. A rank that was told says so on the job's store. The first drafter rank looks
there once a step and tells the other drafter ranks: so all of them leave the loop before the same step, and the
stream ends before that step's first training batch, which ends the target ranks.
"""

import os
import signal
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflash_ddp.control import Control
from dflash_ddp.log import STOP_SIGNALS, exit_on_error, logger

ONE_REQUEST_S = 1.0  # a launcher may pass on what a rank was sent itself: signals so near are one
_TRAINING = "training has begun"


def listen(control: Control) -> None:
    """Hear signals from here on, in a thread: the main thread may sit in a call that takes minutes.

    Call it in the main thread, after the processes of data preparation have ended.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # what counts is the byte in the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_hear, args=(control, reader), name="signals", daemon=True).start()


def _hear(control: Control, reader: int) -> None:
    who, first_at = control.topology.describe(control.rank), None
    with exit_on_error(control.fail):
        while True:
            for number in os.read(reader, 64):
                told, now = f"{signal.Signals(number).name} at {who}", time.monotonic()
                if number == signal.SIGUSR1:
                    control.ask("save", told)
                elif number not in STOP_SIGNALS:
                    continue
                elif control.said(_TRAINING) is None:
                    control.abort(f"{told} before training began: there is nothing to save")
                elif first_at is None:
                    first_at = now
                    control.ask("stop", told)
                elif now > first_at + ONE_REQUEST_S:
                    control.abort(f"a second {told}: the run ends at once, without saving")


class Wish(NamedTuple):
    """What all drafter ranks do before the next step."""

    save: bool
    stop: bool


class Stopping:
    """One drafter rank's part in the agreement."""

    def __init__(
        self, control: Control, group: dist.ProcessGroup | None, max_hours: float | None
    ) -> None:
        """From here on signals are wishes; before, they end the run, as there is nothing to save.

        Args:
            control: the control plane.
            group: all drafter ranks; CPU tensors go through gloo.
            max_hours: stop after so many hours since this rank started.
        """
        self.reason: str | None = None
        """Why the run stops, on the first drafter rank."""
        self._control, self._group = control, group
        self._leader = control.topology.drafter_ranks[0]
        self._ends_at = float("inf")
        if max_hours is not None:
            self._ends_at = control.started_at + 3600 * max_hours
            self._limit = f"max_hours={max_hours}"
        control.publish(_TRAINING)

    def agree(self) -> Wish:
        """What the first drafter rank has heard of; equal on all drafter ranks."""
        flags = torch.zeros(2, dtype=torch.int64)
        if self._control.rank == self._leader:
            told = self._control.asked("save")
            if told is not None:
                logger.info("%s: saving what is new, then going on", told)
            self.reason = self._control.asked("stop")
            if self.reason is None and time.monotonic() >= self._ends_at:
                self.reason = self._limit
            flags = torch.tensor([told is not None, self.reason is not None], dtype=torch.int64)
        # Who meets: all drafter ranks, once a step, in host memory: the GPU is not asked. A rank
        # that does not come is found by its heartbeat.
        dist.broadcast(flags, self._leader, group=self._group)
        save, stop = flags.tolist()
        return Wish(bool(save), bool(stop))
