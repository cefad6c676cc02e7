"""The run on the console: one line a row, or on a terminal a panel at its foot that stays while the log scrolls above.

In: rows of the log and a `Setup`. Out: text. `line`, `block` and `advise` are pure; `Panel` holds the last values and
writes. The panel takes the lowest lines out of the terminal's scrolling region, so that other processes, which know
nothing of it, cannot write over it.
"""

import logging
import os
import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TextIO

from dflash_ddp.costs import Gpu
from dflash_ddp.facts import Facts

logger = logging.getLogger(__name__)

PATIENCE = 5  # rows in a row
WAITS = 0.2  # share of a step
LINES = 7
BAR = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the numbers of a row are judged by.

    Attributes:
        steps: of the run.
        targets, drafters, colocated, num_anchors, batches_per_step: as set.
        target_flops: operations a token of a target.
        drafter_flops: operations of a packed batch of a drafter, forward and backward.
        fixed_share: part of a drafter's time that does not depend on the anchors.
        peak_flops: the vendor's dense bf16 rate of one GPU; None if unknown.
        shared_cores: ranks on a CPU take its cores from each other, so no split can be advised.
    """

    steps: int | None
    targets: int
    drafters: int
    colocated: bool
    num_anchors: int
    batches_per_step: int
    target_flops: float
    drafter_flops: float
    fixed_share: float
    peak_flops: float | None
    shared_cores: bool = False


def make_setup(facts: Facts, gpu: Gpu | None, *, cpu: bool) -> Setup:
    """From what is known before the first step; `gpu` is that of all ranks, None if unknown."""
    config = facts.config
    return Setup(
        steps=config.steps,
        targets=config.split.targets,
        drafters=config.split.drafters,
        colocated=config.split.colocated,
        num_anchors=config.drafter.num_anchors,
        batches_per_step=config.batches_per_step,
        target_flops=facts.target_flops(),
        drafter_flops=facts.drafter_flops(),
        fixed_share=facts.fixed_share(),
        peak_flops=gpu.tflops * 1e12 if gpu else None,
        shared_cores=cpu,
    )


def derived(row: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Shares of waiting and of the chips' rate, from a training row."""
    step_s = row.get("speed/step_s")
    if not step_s:
        return {}
    found = (
        {}
        if setup.colocated
        else {
            f"wait/{role}_share": min(row[f"wait/{role}"] / step_s, 1.0)
            for role in ("target", "drafter")
        }
    )
    if setup.peak_flops:
        targets, drafters = setup.targets * setup.peak_flops, setup.drafters * setup.peak_flops
        found["speed/mfu_target"] = row["speed/tokens_per_s"] * setup.target_flops / targets
        found["speed/mfu_drafter"] = (
            setup.batches_per_step / step_s * setup.drafter_flops / drafters
        )
    return found


def advise(setup: Setup, waits: tuple[float, float]) -> str | None:
    """What to change when a role waits too long, and what it would gain; None if all is well.

    With w the share that a role waits, its ranks could do 1 / (1 - w) times as much: from that
    follow the rates of any other split.

    Args:
        setup: the run.
        waits: shares of the time that targets and drafters wait.
    """
    if setup.colocated or setup.shared_cores or max(waits) <= WAITS:
        return None
    target_waits, drafter_waits = (min(w, 0.99) for w in waits)
    targets, drafters, fixed = setup.targets, setup.drafters, setup.fixed_share
    one_target = 1 / (targets * (1 - target_waits))  # rates, in units of the run's own
    one_drafter = 1 / (drafters * (1 - drafter_waits))
    if drafter_waits > target_waits:
        more, fewer, waiting = targets + 1, drafters - 1, "drafters"
        time = 1 / (1 - drafter_waits)  # that a drafter may take, in units of what it takes now
        share = drafter_waits
    else:
        more, fewer, waiting = targets - 1, drafters + 1, "targets"
        time, share = 1 - target_waits, target_waits
    text = f"{waiting} wait {share:.0%} of the time:"
    gain = min(more * one_target, fewer * one_drafter) - 1
    if more and fewer and gain > 0.02:
        text += f" split.targets={more} split.drafters={fewer} would give {gain:+.0%};"
    anchors = round(setup.num_anchors * (time - fixed) / (1 - fixed))
    if waiting == "drafters":
        return f"{text} drafter.num_anchors={anchors} would cost no time"
    if anchors < 1:
        return text.rstrip(":;")
    return f"{text} drafter.num_anchors={anchors} would give {1 / (1 - target_waits) - 1:+.0%}"


FIELDS = (
    ("train/loss", "loss {:.4f}"),
    ("train/accuracy", "accuracy {:.3f}"),
    ("train/accept_length", "accept {:.2f}"),
    ("heldout/accept_length", "held-out accept {:.3f}"),
    ("heldout/walk_on_text", "held-out walk on text {:.3f}"),
    ("speed/tokens_per_s", "{:,.0f} tokens/s"),
    ("speed/mfu_target", "MFU targets {:.0%}"),
    ("speed/mfu_drafter", "MFU drafters {:.0%}"),
    ("wait/target_share", "targets wait {:.0%}"),
    ("wait/drafter_share", "drafters wait {:.0%}"),
    ("channel/slots_full", "slots full {:.0f}"),
    ("memory/target_gib", "target {:.1f} GiB"),
    ("memory/drafter_gib", "drafter {:.1f} GiB"),
)


def _shown(row: dict[str, Any], keys: tuple[tuple[str, str], ...]) -> str:
    return "  ".join(text.format(row[key]) for key, text in keys if key in row)


def duration(seconds: float) -> str:
    """`2 d 3 h`, `1 h 20 min`, `45 s`."""
    for unit, size, below, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // part:.0f} {below}"
    return f"{seconds:.0f} s"


def line(row: dict[str, Any], setup: Setup, left_s: float | None) -> str:
    """A row in one line."""
    left = f"  ETA {duration(left_s)}" if left_s is not None else ""
    return f"step {row['step']}/{setup.steps}  {_shown(row, FIELDS)}{left}"


def block(
    values: dict[str, Any], setup: Setup, left_s: float | None, advice: str | None
) -> list[str]:
    """The panel: `LINES` lines from the last value of each key."""
    step, steps = values["step"], setup.steps or 1
    done = min(step / steps, 1.0)
    left = f"  ETA {duration(left_s)}" if left_s is not None else ""
    full = round(done * BAR)
    first, _, second = (f"advice: {advice}" if advice else "").partition("; ")
    return [
        "─" * 60,
        f"step {step}/{setup.steps}  {'█' * full}{'░' * (BAR - full)}  {done:.1%}{left}",
        _shown(values, FIELDS[:5]),
        _shown(values, FIELDS[5:8]),
        _shown(values, FIELDS[8:]),
        first,
        f"        {second}" if second else "",
    ]


class Panel:
    """The last value of each key, and where it is shown."""

    def __init__(self, setup: Setup, stream: TextIO | None = None) -> None:
        """A panel if `stream` (stderr) is a terminal, else lines of the log."""
        self._setup, self._stream = setup, stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._values: dict[str, Any] = {}
        self._waits: deque[tuple[float, float]] = deque(maxlen=PATIENCE)
        self._first: tuple[int, float] | None = None
        self._size: tuple[int, int] | None = None
        self._advice: str | None = None

    def show(self, row: dict[str, Any]) -> None:
        """Take a row in and show it; advice is said anew when it has changed."""
        self._values |= row
        left_s, before = self._left_s(row), self._advice
        if "wait/target_share" in row:
            self._waits.append((row["wait/target_share"], row["wait/drafter_share"]))
            self._advice = self._advise()
        if self._live:
            self._draw(block(self._values, self._setup, left_s, self._advice))
            return
        logger.info("%s", line(row, self._setup, left_s))
        if self._advice and before is None:
            logger.info("advice: %s", self._advice)

    def _advise(self) -> str | None:
        """From the means of the last rows, if each of them gives reason to."""
        if len(self._waits) < PATIENCE or not all(advise(self._setup, w) for w in self._waits):
            return None
        targets, drafters = (sum(w) / PATIENCE for w in zip(*self._waits, strict=True))
        return advise(self._setup, (targets, drafters))

    def _left_s(self, row: dict[str, Any]) -> float | None:
        """Seconds to the last step at the pace since the first training row."""
        if "speed/step_s" not in row and self._first is None:
            return None
        now, step = time.monotonic(), row["step"]
        if self._first is None:
            self._first = step, now
        steps, since = step - self._first[0], now - self._first[1]
        if not steps or self._setup.steps is None:
            return None
        return (self._setup.steps - step) * since / steps

    def _draw(self, lines: list[str]) -> None:
        columns, rows = size = shutil.get_terminal_size()
        if rows <= LINES + 2:
            return
        top = rows - LINES
        text = ""
        if size != self._size:  # make room, and keep the log out of it
            text += "\n" * LINES + f"\x1b[1;{top}r\x1b[{top};1H"
            self._size = size
        text += "\x1b7"
        for number, shown in enumerate(lines, start=1):
            text += f"\x1b[{top + number};1H\x1b[2K{shown[:columns]}"
        self._stream.write(text + "\x1b8")
        self._stream.flush()

    def close(self) -> None:
        """Give the terminal its whole height back; the panel stays above the next prompt."""
        if self._size is not None:
            self._stream.write(f"\x1b[r\x1b[{self._size[1]};1H\n")
            self._stream.flush()
            self._size = None
