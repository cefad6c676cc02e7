"""A sweep: one fresh torchrun for each job, what each came to, and a comparison at the end.

Hydra's sweepers call `train.main` once for each job, in one parent process. `run_job` waits for it and `note_job` notes
it in `<sweep dir>/jobs.jsonl`, also when it failed: the next one starts all the same. `Sweep`, a Hydra callback, prints
the table and writes `<sweep dir>/report.html` when all are done; `run_job` does if the sweep is told to end.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # it has no public name
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from dflash_ddp.log import STOP_SIGNALS
from dflash_ddp.metrics_file import METRICS_FILE, read_rows

JOBS_FILE = "jobs.jsonl"
COLUMNS = (
    ("accept length", "heldout/accept_length", "{:.3f}"),
    ("walk on text", "heldout/walk_on_text", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("tokens/s", "speed/tokens_per_s", "{:,.0f}"),
    ("step", "step", "{}"),
)
SHOWN_JOBS = 20
"""Of those that were not started, so many are named."""
_planned: list[str] = []  # what this process's sweep was to run, in order, as far as that is known


def run_job(command: list[str]) -> int:
    """Run a job to its end; its exit code.

    Raises:
        SystemExit: this process was told to end; the job has ended, no other may start, and what
            came of the sweep so far has been said.
    """
    stopped = []
    # A session of its own: else a terminal's Ctrl-C would reach the job twice, from there and from here.
    child = subprocess.Popen(command, env=clean_environment(), start_new_session=True)

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        child.terminate()

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if stopped:
        note_job(128 + stopped[0])
        with suppress(OSError):  # after SIGHUP nobody may be there to read it
            tell_stopped(Path(HydraConfig.get().sweep.dir))
        raise SystemExit(128 + stopped[0])
    return code


def note_job(code: int) -> float | None:
    """Note the job that Hydra is at; its goal, None if it failed or has none.

    `code`: what it ended with; 128 + a signal if the sweep, and so the job, was told to end by one.
    """
    hydra = HydraConfig.get()
    folder, sweep = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
    values = last_values(folder) if code == 0 or code > 128 else {}
    note = {"folder": str(folder), "code": code, "values": values}
    sweep.mkdir(parents=True, exist_ok=True)
    with (sweep / JOBS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")
    return goal(values)


def goal(values: dict[str, float]) -> float | None:
    """What a sweep maximises: accept length, or the walk on answers that are not the target's own."""
    return values.get("heldout/accept_length", values.get("heldout/walk_on_text"))


def clean_environment() -> dict[str, str]:
    """Ours, without what an outer torchrun has set: a job has a launcher of its own."""
    names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"}
    kinds = ("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(kinds)}
    return kept if "RANK" in os.environ else dict(os.environ)


def last_values(folder: Path) -> dict[str, float]:
    """The last value of each column in a run's rows, of held-out text the highest; what there is."""
    found: dict[str, float] = {}
    for row in read_rows(folder):
        for _, key, _ in COLUMNS:
            if key in row:
                best = found.get(key, row[key]) if key.startswith("heldout/") else row[key]
                found[key] = max(row[key], best)
    return found


def table(jobs: list[dict[str, Any]]) -> str:
    """One line a job, the longest accept length first; failed ones last."""
    ranked = sorted(jobs, key=lambda j: (j["code"] != 0, -(goal(j["values"]) or 0.0)))
    cells = [["job", *(name for name, _, _ in COLUMNS), "end"]]
    for job in ranked:
        values = job["values"]
        shown = [form.format(values[k]) if k in values else "-" for _, k, form in COLUMNS]
        cells.append(
            [
                Path(job["folder"]).name,
                *shown,
                end_of(job["code"]),
            ]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells
    )


def end_of(code: int) -> str:
    """How a job ended, in words; see `note_job`."""
    if code > 128:
        return f"stopped by {signal.Signals(code - 128).name}"
    return "ok" if code == 0 else f"failed, code {code}"


def tell_jobs(folder: Path) -> list[dict[str, Any]]:
    """Print the table of a sweep's jobs so far, and write the report of those that came to their end."""
    lines = (folder / JOBS_FILE).read_text(encoding="utf-8").splitlines()
    jobs = [json.loads(line) for line in lines]
    sys.stdout.write(f"\n{table(jobs)}\n")
    folders = [Path(job["folder"]) for job in jobs if job["code"] == 0]
    if done := [f for f in folders if (f / METRICS_FILE).is_file()]:  # none of a dry run
        from dflash_ddp import report

        report.write_report(done, folder / report.FILE)
        sys.stdout.write(f"{folder / report.FILE}\n")
    sys.stdout.flush()
    return jobs


def tell_stopped(folder: Path) -> None:
    """The same of a sweep that ends early, and which jobs it has not come to."""
    left = _planned[len(tell_jobs(folder)) :]
    if left:
        more = f" and {len(left) - SHOWN_JOBS} more" if len(left) > SHOWN_JOBS else ""
        sys.stdout.write(f"not started: {'; '.join(left[:SHOWN_JOBS])}{more}\n")
        sys.stdout.flush()


def planned_jobs(config: DictConfig) -> list[str]:
    """Names of a sweep's jobs in the order of Hydra's sweeper; of Optuna's, which chooses later, numbers."""
    sweeper = config.hydra.sweeper
    if "n_trials" in sweeper:
        return [f"trial {number + 1}" for number in range(sweeper.n_trials)]
    params = sweeper.get("params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    with suppress(HydraException):  # a glob, for one: its names are known to Hydra alone
        parsed = OverridesParser.create().parse_overrides(words)
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
        return [job_name(job, params) for job in jobs]
    return []


def job_name(overrides: Sequence[str], params: Mapping[str, Any] | None) -> str:
    """Folder of a job: its own settings, without those that all jobs of the command share."""
    words = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    given = OverridesParser.create().parse_overrides(words)
    swept = {o.key_or_group for o in given if o.is_sweep_override()} | {*(params or ())}
    own = [text for text in overrides if text.split("=")[0].lstrip("+") in swept]
    return folder_name(",".join(own) or "job")


def folder_name(own: str) -> str:
    """Settings as one folder's name: no separators, 80 bytes at most, distinct."""
    plain = re.sub(r"[^\w.,=+-]", "_", own, flags=re.ASCII)
    if plain == own and len(plain) <= 80:
        return plain
    digest = hashlib.blake2b(own.encode(), digest_size=4).hexdigest()
    return f"{plain[:70]}-{digest}"


OmegaConf.register_new_resolver("swept", job_name, replace=True)  # for conf/train.yaml


class Sweep(Callback):
    """Hydra's hook around a sweep."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Forget the jobs of an earlier sweep in the same folder; tell Optuna what a good job is."""
        if (
            "direction" in config.hydra.sweeper
        ):  # Optuna's, which else minimises, and ends at a failure
            with read_write(config):
                config.hydra.sweeper.direction = "maximize"
                config.hydra.sweeper.max_failure_rate = 1.0
        _planned[:] = planned_jobs(config)
        if os.environ.get("RANK", "0") == "0":
            (Path(config.hydra.sweep.dir) / JOBS_FILE).unlink(missing_ok=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Say what came of it.

        Raises:
            SystemExit: a job failed.
        """
        folder = Path(config.hydra.sweep.dir)
        if not (folder / JOBS_FILE).is_file():  # no job came so far
            return
        if any(job["code"] for job in tell_jobs(folder)):
            raise SystemExit(1)
