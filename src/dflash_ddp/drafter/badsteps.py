"""Steps whose loss or gradient is not finite: left out on all ranks alike, counted, reported; too many end the run.

The norm of the reduced gradient is the same on all drafter ranks, and a loss that is not finite makes the gradient so
(`forward_backward`). AdamW is told on the device and then changes nothing (`step_if_finite`). The host reads the flag
when it has arrived, some steps later, so a steady step waits for nothing. Each drafter rank writes what it held:

    bad_steps/step_00000123_rank_6.json    batches with their loss and documents: enough to make the step again
"""

import json
import logging
import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ddp.batch import PackedBatch
from dflash_ddp.startup import Run

logger = logging.getLogger(__name__)


class Flying(NamedTuple):
    """A step whose numbers are on their way to the host: [gradient norm, loss of each microbatch]."""

    step: int
    batches: list[PackedBatch]
    values: Tensor
    event: torch.cuda.Event | None


class BadSteps:
    """One drafter rank's view; `step` counts like the rows of metrics: steps that are complete."""

    def __init__(self, run: Run, rank: int, *, speaks: bool, count: int) -> None:
        """Go on counting from `count`, bad steps before the checkpoint that the run goes on from."""
        self._run, self._rank, self._speaks = run, rank, speaks
        self._before, self._steps = count, list[int]()
        self._in_a_row = 0
        self._flying: deque[Flying] = deque()

    def add(
        self, step: int, batches: list[PackedBatch], losses: list[Tensor], grad_norm: Tensor
    ) -> None:
        """Send the numbers of a step on their way, and look at those that have arrived."""
        values = torch.stack([x.detach().double().reshape(()) for x in (grad_norm, *losses)])
        event = None
        if values.is_cuda:
            on_host = torch.empty_like(values, device="cpu", pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            values, event = on_host, torch.cuda.Event()
            event.record()
        self._flying.append(Flying(step, batches, values, event))
        self.look(wait=False)

    def look(self, *, wait: bool) -> None:
        """Judge what has arrived; with `wait`, all.

        Raises:
            FloatingPointError: `optim.max_bad_steps` in a row.
        """
        while self._flying:
            event = self._flying[0].event
            if event is not None and wait:
                event.synchronize()
            if event is not None and not event.query():
                return
            self._judge(self._flying.popleft())

    def count(self, step: int) -> int:
        """Bad steps up to and with this one."""
        return self._before + sum(bad <= step for bad in self._steps)

    def _judge(self, flying: Flying) -> None:
        grad_norm, *losses = flying.values.tolist()
        if math.isfinite(grad_norm):
            self._in_a_row = 0
            return
        self._steps.append(flying.step)
        self._in_a_row += 1
        numbers = ", ".join(str(batch.index) for batch in flying.batches)
        told = (
            f"step {flying.step}: loss or gradient is not finite (gradient norm {grad_norm}; here "
            f"batch {numbers} with loss {losses})"
        )
        self._write(flying, grad_norm, losses)
        limit = self._run.config.optim.max_bad_steps
        if self._in_a_row >= limit:
            raise FloatingPointError(
                f"{told}; {limit} such steps in a row are optim.max_bad_steps={limit}: see "
                f"{self._run.folder / 'bad_steps'}; a lower optim.lr may help"
            )
        if self._speaks or not all(map(math.isfinite, losses)):
            logger.warning("%s; the step is left out", told)

    def _write(self, flying: Flying, grad_norm: float, losses: list[float]) -> None:
        held = [
            {
                "batch": batch.index,
                "loss": str(loss),
                "documents": batch.document_ids.tolist(),
                "rows": [self._run.text.origin(int(number)) for number in batch.document_ids],
            }
            for batch, loss in zip(flying.batches, losses, strict=True)
        ]
        folder = self._run.folder / "bad_steps"
        record = {"step": flying.step, "grad_norm": str(grad_norm), "batches": held}
        self._run.own_folder.check()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"step_{flying.step:08d}_rank_{self._rank}.json"
            file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("%s: documents cannot be written: %s", folder, error)
