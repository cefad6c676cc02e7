"""Where time and memory go: traces of some steps, and what to do when memory runs out.

`profile.steps=[20,23]` writes `profile/<role>_rank<r>.json.gz` on the first rank of each role, for Perfetto or
chrome://tracing, and prints the operations that took most time. A target rank's steps are those of the items that it
computes, some of them ahead of the drafter's. An out-of-memory error leaves `profile/memory_rank<r>.pickle`, for
pytorch.org/memory_viz, and says which settings to lower.
"""

import logging
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dflash_ddp.config import Config
from dflash_ddp.costs import GIB
from dflash_ddp.facts import read_facts

logger = logging.getLogger(__name__)

FOLDER = "profile"
TOP_ROWS = 15
MEMORY_EVENTS = 100_000
MARGIN = 1.2  # over what could not be allocated, since memory is also cut into pieces
_UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def record_memory() -> None:
    """From here on note who allocates what on the GPU, by lines of Python: for a snapshot."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MEMORY_EVENTS)


class StepProfiler:
    """A trace of steps first..end-1; does nothing on other steps, or if none is asked for."""

    def __init__(
        self, config: Config, first_step: int, device: torch.device, name: str, *, wanted: bool
    ) -> None:
        """`name` is that of the file; `wanted` on the first rank of a role.

        A run that ends before the steps asked for, or has made them before it was resumed, says so.
        """
        steps = config.profile.steps if wanted else None
        assert config.steps is not None
        if steps and not set(range(*steps)) & set(range(first_step, config.steps)):
            made = f"begins at step {first_step} and ends before step {config.steps}"
            logger.warning("profile.steps=%s: there will be no trace, the run %s", steps, made)
        self._first, self._end = steps or (-1, -1)
        self._file = Path(config.output_dir) / FOLDER / f"{name}.json.gz"
        self._cuda = device.type == "cuda"
        self._profile: profile | None = None

    def at(self, step: int) -> None:
        """This step begins now."""
        if self._profile is None and self._first <= step < self._end:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._cuda else []
            self._profile = profile(activities=activities)
            self._profile.start()
        elif self._profile is not None and step >= self._end:
            self.close()

    def close(self) -> None:
        """Write the trace that runs, if one does, and print its top operations."""
        running, self._profile = self._profile, None
        if running is None:
            return
        self._first = self._end  # once
        running.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._file))
        order = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        top = running.key_averages().table(
            sort_by=order, row_limit=TOP_ROWS, max_name_column_width=60
        )
        logger.info("trace in %s; by %s:\n%s", self._file, order, top)


def out_of_memory(config: Config, role: str, rank: int, error: torch.OutOfMemoryError) -> str:
    """Write a snapshot of the GPU's memory, and say what to lower, to what, and what that saves."""
    file = Path(config.output_dir) / FOLDER / f"memory_rank{rank}.pickle"
    advice = read_facts(config).memory_advice(role, wanted_bytes(error))
    advice = advice or ["a GPU with more memory: no setting is left to lower"]
    lines = [f"rank {rank} ({role}) has no memory left; any of these would help:"]
    lines += [f"  {line}" for line in advice]
    if torch.cuda.is_available():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        more = "" if config.profile.memory else "; profile.memory=true adds who allocated what"
        lines.append(f"what held the memory: {file}{more}")
    return "\n".join(lines)


def wanted_bytes(error: torch.OutOfMemoryError) -> float:
    """Bytes to save: those that could not be allocated, and a margin."""
    found = re.search(r"allocate ([\d.]+) (GiB|MiB|KiB|bytes)", str(error))
    return MARGIN * float(found[1]) * _UNITS[found[2]] if found else GIB


def peak_gib(device: torch.device) -> float | None:
    """Most memory allocated so far; None on a CPU. Asks the allocator, not the GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**30
