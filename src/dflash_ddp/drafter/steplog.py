"""From the sums of some steps to one row of the log, read from the device one step later.

`StepLog` collects on the device; `measure` sums over the drafter ranks and starts the way to the host; `write` turns
what has arrived into ratios. All drafter ranks take part in `measure`; the first of them owns the files.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dflash_ddp.accept import AcceptTally
from dflash_ddp.control import Control
from dflash_ddp.drafter.metrics import empty_sums, step_metrics
from dflash_ddp.lanes import Mark, mark, seconds_between
from dflash_ddp.profiling import peak_gib
from dflash_ddp.runlog import RunLog
from dflash_ddp.world import World


class Pending(NamedTuple):
    """A row that the device has still to finish."""

    step: int
    values: Tensor
    end: Mark
    pauses: list[tuple[Mark, Mark]]
    lr: float
    num_steps: int
    slots_full: int
    target_wait: float


class StepLog:
    """Sums since the last row, and where rows go.

    Attributes:
        tokens: trained on so far, over all ranks, up to the last row written.
        last_loss: of the last row.
        num_steps: steps since the last row was measured.
    """

    def __init__(
        self,
        world: World,
        control: Control,
        log: RunLog | None,
        *,
        block_size: int,
        tokens: int,
        wait_s: Callable[[], float],
        more: Callable[[int], dict[str, float]],
    ) -> None:
        """Start with nothing collected.

        Args:
            world: this rank among the others.
            control: where target ranks say how long they waited.
            log: given on the first drafter rank.
            block_size: B.
            tokens: trained on so far.
            wait_s: seconds that this rank has waited for features since the run began.
            more: further values for the row of a step.
        """
        self.tokens = tokens
        self.last_loss: float | None = None
        self.num_steps = 0
        self._world, self._control, self._log, self._more = world, control, log, more
        self._wait_s = wait_s
        self._sums = empty_sums(block_size, world.device)
        self._step_sums = torch.zeros_like(self._sums)  # of the step that is being made
        self._grad_norm: Tensor | None = None
        self._waits_before, _ = self._waits()
        # Of each wait that goes on when a pause ends: seconds of the pause, and what was said then.
        self._reaching, self._said = np.zeros_like(self._waits_before), self._waits_before
        self._last_end = mark(world)
        self._pauses: list[tuple[Mark, Mark]] = []
        self._pending: Pending | None = None
        self._tokens_before = 0  # of `_sums`, trained on before this run went on

    def gather(self) -> list[list[float]]:
        """What each drafter rank has collected since the last row measured, for a checkpoint."""
        parts = [torch.empty_like(self._sums) for _ in self._world.topology.drafter_ranks]
        # Who meets: all drafter ranks, before a checkpoint; one that fails ends the job.
        dist.all_gather(parts, self._sums, group=self._world.drafter_group)
        return torch.stack(parts).tolist()

    def restore(self, sums: list[list[float]], ordinal: int) -> None:
        """Go on from `gather`; of another number of ranks, the first one takes all."""
        if len(sums) != len(self._world.topology.drafter_ranks):
            total = np.sum(sums, axis=0)
            sums = [total if rank == 0 else 0 * total for rank in range(ordinal + 1)]
        self._sums.copy_(torch.as_tensor(sums[ordinal], dtype=torch.float64))
        self._tokens_before = sum(step_metrics(list(part)).num_tokens for part in sums)

    def add(self, sums: Tensor) -> None:
        """Collect a microbatch."""
        self._step_sums += sums

    def end_step(self, grad_norm: Tensor) -> None:
        """A step is complete; its gradient norm before the clip. Not finite: it was left out."""
        self._sums += torch.where(grad_norm.isfinite(), self._step_sums, 0.0)
        self._step_sums = torch.zeros_like(self._sums)
        self._grad_norm = grad_norm
        self.num_steps += 1
        if self._reaching.any():  # soon, so that it is not added to waits after it
            self._settled_waits()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside counts neither as time of steps nor as waiting in them."""
        begin = mark(self._world)
        if isinstance(begin, torch.cuda.Event):
            begin.synchronize()  # so that waits of the steps before are known; a pause waits anyway
        waits, start = self._settled_waits(), time.monotonic()
        yield
        self._said, waiting = self._waits()
        self._waits_before = self._waits_before + self._said - waits
        before = np.where(self._said > waits, 0.0, self._reaching)  # a pause may follow a pause
        self._reaching = np.where(waiting, before + time.monotonic() - start, 0.0)
        self._pauses.append((begin, mark(self._world)))

    def measure(self, step: int, *, lr: float, slots_full: int) -> None:
        """Sum over ranks and start the way to the host; writes the row measured before.

        Args:
            step: optimizer steps that are complete.
            lr: learning rate of the last of them.
            slots_full: feature batches that lay ready when it last asked for one.
        """
        assert self._grad_norm is not None
        device = self._world.device
        waits = self._settled_waits()
        drafter_wait, *target_waits = (waits - self._waits_before).tolist()
        target_wait = sum(target_waits) / max(1, len(target_waits))
        self._waits_before = waits
        # Filled in on the device: a copy from pageable memory would wait for all that is queued.
        values = torch.cat([self._sums, self._sums.new_full((1,), drafter_wait)])
        # Who meets: all drafter ranks, at the same steps; one that fails ends the job.
        dist.all_reduce(values, group=self._world.drafter_group)
        values = torch.cat([values, self._grad_norm.double().reshape(1)])
        if device.type == "cuda":
            on_host = torch.empty_like(values, device="cpu", pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
        end = mark(self._world)
        self.write()
        self._pending = Pending(
            step, values, end, self._pauses, lr, self.num_steps, slots_full, target_wait
        )
        self._sums, self.num_steps, self._pauses = torch.zeros_like(self._sums), 0, []

    def write(self) -> None:
        """Write the measured row, if there is one, once the device has finished it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if isinstance(pending.end, torch.cuda.Event):
            pending.end.synchronize()
        *sums, drafter_wait, grad_norm = pending.values.tolist()
        metrics = step_metrics(sums)
        self.tokens += metrics.num_tokens
        self.last_loss = metrics.loss
        elapsed = seconds_between(self._last_end, pending.end)
        elapsed -= sum(seconds_between(begin, end) for begin, end in pending.pauses)
        self._last_end = pending.end
        num_tokens, self._tokens_before = metrics.num_tokens - self._tokens_before, 0
        if self._log is None:
            return
        num_drafters = len(self._world.topology.drafter_ranks)
        row = {
            "step": pending.step,
            "tokens": self.tokens,
            "train/loss": metrics.loss,
            "train/accuracy": metrics.accuracy,
            "train/accept_length": metrics.accept_length,
            "optim/lr": pending.lr,
            "optim/grad_norm": grad_norm,
            "speed/tokens_per_s": num_tokens / elapsed,
            "speed/step_s": elapsed / pending.num_steps,
            "wait/target": pending.target_wait / pending.num_steps,
            "wait/drafter": drafter_wait / num_drafters / pending.num_steps,
            "channel/slots_full": pending.slots_full,
            "memory/target_gib": self._target_gib(),
            "memory/drafter_gib": peak_gib(self._world.device),
        }
        slots = enumerate(metrics.slot_accuracy, start=1)
        row |= self._more(pending.step)
        self._log.write(row | {f"train/slot_{k}": share for k, share in slots})

    def write_heldout(self, step: int, tally: AcceptTally, *, generated: bool) -> None:
        """Write the row of an evaluation; see `AcceptTally.metrics`."""
        if self._log is not None:
            row = {"step": step, "tokens": self.tokens}
            self._log.write(row | tally.metrics(generated=generated))

    def _settled_waits(self) -> np.ndarray:
        """Seconds waited by now. Where a wait reached out of a pause, the pause's part is taken out.

        A target rank says what it has waited when it goes on, so that is known only now.
        """
        waits, _ = self._waits()
        inside = np.minimum(waits - self._said, self._reaching)
        self._waits_before = self._waits_before + inside
        self._reaching = np.where(waits > self._said, 0.0, self._reaching)
        return waits

    def _waits(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds waited since the run began, and who is waiting: this rank for features, target ranks for slots.

        As far as they have said it; only the rank that logs asks them.
        """
        topology, said = self._world.topology, [f"{self._wait_s()}"]
        if self._log is not None and not topology.colocated:
            said += [self._control.said(f"wait/{r}") or "0" for r in topology.target_ranks]
        seconds, _, waiting = zip(*(text.partition(" ") for text in said), strict=True)
        return np.array(seconds, dtype=float), np.array(waiting) != ""

    def _target_gib(self) -> float | None:
        """Most memory that a target rank has said it took; None on CPUs and where roles share it."""
        said = [self._control.said(f"memory/{r}") for r in self._world.topology.target_ranks]
        return max((float(text) for text in said if text), default=None)
