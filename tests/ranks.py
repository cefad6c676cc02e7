"""Runs a function in several processes that look like the ranks of a torchrun job.

In: a module-level function `function(rank, *args)`. Each process has torchrun's variables and finds
a TCPStore on a free port, held by the test process (as torchrun's agent does) or by rank 0. Out:
one `Outcome` a rank. A watchdog sees to it that nothing outlives `run_ranks`: after `limit_s` every
process prints where its threads are and is killed.

Processes come from a fork server that has imported torch and the package once, so a rank starts in
some 50 ms.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

# A store asks for the name of each new client; where no name server answers, that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The fork server of Python 3.11 does not learn this process's sys.path, and would preload nothing without a word.
_path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_path)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "training"])


@dataclass
class Outcome:
    """How a rank ended."""

    rank: int
    value: Any  # what the function returned; None when it did not return
    error: str  # traceback of its exception, or ""
    exit_code: int | None  # negative: signal; None: stuck, killed by the watchdog
    output: str  # stdout and stderr
    ended_s: float  # seconds from the start of the job
    ended_at: float  # the same as time.monotonic(), which all processes share


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    limit_s: float = 60.0,
    check: bool = True,
    may_hang: Collection[int] = (),
    store_in_rank0: bool = False,
) -> list[Outcome]:
    """Run `function(rank, *args)` in `num_ranks` processes and wait for all of them.

    check: raise an AssertionError with all outputs unless every rank returned.
    may_hang: ranks that are killed as soon as all others have ended (frozen on purpose).
    """
    server = None
    if not store_in_rank0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port if server else _free_port()
    env = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex[:8],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(server is not None),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    if cache := os.environ.get("XDG_CACHE_HOME"):  # the fork server knows what was set at its start
        env["XDG_CACHE_HOME"] = cache
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(target=_child, args=(function, rank, args, env, folder), daemon=True)
            for rank in range(num_ranks)
        ]
        start = time.monotonic()
        for process in processes:
            process.start()
        ended = _watch(processes, start, limit_s, set(may_hang))
        outcomes = [
            _outcome(rank, process, start, ended[rank], Path(folder))
            for rank, process in enumerate(processes)
        ]
    if check and not all(outcome.exit_code == 0 for outcome in outcomes):
        raise AssertionError(report(outcomes))
    return outcomes


def is_preloaded(_rank: int, module: str) -> bool:
    """Whether a rank finds a module that the fork server has imported."""
    return module in sys.modules


def report(outcomes: list[Outcome]) -> str:
    """All outputs, for the message of a failed test."""
    return "\n".join(
        f"--- rank {o.rank}: exit code {o.exit_code} after {o.ended_s:.1f} s\n{o.output}{o.error}"
        for o in outcomes
    )


def _free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def _child(function: Callable, rank: int, args: tuple, env: dict, folder: str) -> None:
    """Body of a rank: redirect the output, run, leave the result in a file."""
    out = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        result = (function(rank, *args), "")
    except BaseException:  # noqa: BLE001 (reported to the test)
        result = (None, traceback.format_exc())
    Path(f"{folder}/{rank}.pkl").write_bytes(pickle.dumps(result))
    # Not sys.exit: threads of a rank that failed may hang, and so would the end of the interpreter.
    sys.stderr.flush()
    os._exit(1 if result[1] else 0)


def _watch(processes: list, start: float, limit_s: float, may_hang: set[int]) -> dict[int, float]:
    """Wait for the ranks; kill what is left after the limit. Returns when each one ended."""
    ended: dict[int, float] = {}
    while len(ended) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ended and process.exitcode is not None:
                ended[rank] = time.monotonic() - start
        left = [rank for rank in range(len(processes)) if rank not in ended]
        only_hanging = set(left) <= may_hang
        if left and (only_hanging or time.monotonic() - start > limit_s):
            for rank in () if only_hanging else left:
                os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0 if only_hanging else 0.5)
            for rank in left:
                processes[rank].kill()
                processes[rank].join()
                ended[rank] = float("inf")
        time.sleep(0.01)
    return ended


def _outcome(rank: int, process: Any, start: float, ended_s: float, folder: Path) -> Outcome:
    value, error = None, ""
    result, output = folder / f"{rank}.pkl", folder / f"{rank}.out"
    if result.exists():
        value, error = pickle.loads(result.read_bytes())
    text = output.read_text(errors="replace") if output.exists() else ""
    exit_code = None if ended_s == float("inf") else process.exitcode
    return Outcome(rank, value, error, exit_code, text, ended_s, start + ended_s)
