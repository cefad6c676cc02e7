"""Runs the real command in processes of its own, under a watchdog, and reads what a run leaves behind.

In: overrides for `dflash_ddp.train`, started by torchrun or without it. Out: an `Ended` with the exit
code, all output and the seconds it took. Every process that a command starts carries a mark in its
environment, by which it is found whoever its parent is: torchrun's workers are sessions of their own,
and a worker whose launcher was killed has no parent. Nothing that was started outlives its call.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

SOURCE = Path(__file__).resolve().parents[1] / "src"
MODULE = ["-m", "dflash_ddp.train"]
_MARK = "DFLASH_TEST_MARK"
# Keys of a row that differ between any two runs.
_TIMES = ("speed/", "wait/", "checkpoint/", "channel/", "memory/")


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    seconds: float


class Running:
    """A command at work."""

    def __init__(self, command: list[str], output: Path, first_on_path: Path | None) -> None:
        self.mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        env = {key: text for key, text in os.environ.items() if key not in own}
        path = [str(folder) for folder in (first_on_path, SOURCE) if folder]
        env |= {name: value, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        env |= {"RES_OPTIONS": "timeout:1 attempts:1"}
        self._output = output
        self._start = time.monotonic()
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, stdin=subprocess.DEVNULL
            )

    @property
    def process_id(self) -> int:
        """Of the command itself."""
        return self._process.pid

    def text(self) -> str:
        """All output so far."""
        return self._output.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the command itself: the launcher."""
        self._process.send_signal(number)

    def pids(self, *, rank: int | None = None) -> list[int]:
        """Processes of this command that live; of one rank, if asked."""
        marks = [self.mark] if rank is None else [self.mark, f"RANK={rank}"]
        found = []
        for folder in Path("/proc").iterdir():
            # A process may end between any two looks at it; a zombie has an empty environment.
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    variables = (folder / "environ").read_bytes().decode(errors="replace")
                    if set(marks) <= set(variables.split("\0")):
                        found.append(int(folder.name))
        return found

    def wait_until(self, true: Callable[[], bool], limit_s: float) -> None:
        """Wait for something that the command brings about; an AssertionError if it does not."""
        end = time.monotonic() + limit_s
        while not true():
            assert self._process.poll() is None, f"it ended too early:\n{self.text()}"
            assert time.monotonic() < end, f"not true after {limit_s} s:\n{self.text()}"
            time.sleep(0.02)

    def wait(self, limit_s: float) -> Ended:
        """Wait for the end of the command itself; an AssertionError at the limit."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.text()}") from None
        return Ended(code, self.text(), time.monotonic() - self._start)

    def kill_all(self) -> None:
        """End whatever is left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(
    num_processes: int | None,
    overrides: list[str],
    *,
    first_on_path: Path | None = None,
    max_restarts: int = 0,
    agent: list[str] | None = None,
) -> Iterator[Running]:
    """The command at work: under torchrun, or by itself if `num_processes` is None.

    first_on_path: a folder of modules that its processes find before all others.
    max_restarts: how often torchrun starts the ranks anew.
    agent: settings of torchrun, in place of one node alone.
    """
    torchrun: list[str] = []
    if num_processes is not None:
        torchrun = ["-m", "torch.distributed.run", *(agent or ["--standalone"])]
        torchrun += ["--nproc_per_node", str(num_processes), f"--max_restarts={max_restarts}"]
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *torchrun, *MODULE, *overrides]
        command = Running(words, Path(folder) / "output", first_on_path)
        try:
            yield command
        finally:
            command.kill_all()


def run(
    num_processes: int | None,
    overrides: list[str],
    *,
    limit_s: float = 90.0,
    code: int | None = 0,
    first_on_path: Path | None = None,
) -> Ended:
    """Run the command to its end. `code`: the exit code it must have; None: any but 0."""
    with running(num_processes, overrides, first_on_path=first_on_path) as command:
        ended = command.wait(limit_s)
        assert ended.code == code if code is not None else ended.code, ended.output
        assert not command.pids(), f"processes are left over:\n{ended.output}"
        return ended


def all_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The same without what time decides. JSON keeps every digit."""
    return [
        {key: value for key, value in row.items() if not key.startswith(_TIMES)}
        for row in all_rows(folder)
    ]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Masters and moments of a checkpoint."""
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "trainer.safetensors")


def assert_equal_state(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]
