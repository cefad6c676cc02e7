"""A sweep: one fresh torchrun for each job, what each came to, and a comparison at the end.

Hydra's sweepers call `train.main` once for each job, in one parent process. `run_job` waits for it and `note_job` notes
it in `<sweep dir>/jobs.jsonl`, also when it failed: the next one starts all the same. `Sweep`, a Hydra callback, prints
the table and writes `<sweep dir>/report.html` when all are done.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
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


def run_job(command: list[str]) -> int:
    """Run a job to its end; its exit code.

    Raises:
        SystemExit: this process was told to end; the job has ended, and no other may start.
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
        raise SystemExit(128 + stopped[0])
    return code


def note_job(code: int) -> float | None:
    """Note the job that Hydra is at; its goal, None if it failed or has none."""
    hydra = HydraConfig.get()
    folder, sweep = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir)
    values = last_values(folder) if code == 0 else {}
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
                "ok" if job["code"] == 0 else f"failed, code {job['code']}",
            ]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells
    )


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
        lines = (folder / JOBS_FILE).read_text(encoding="utf-8").splitlines()
        jobs = [json.loads(line) for line in lines]
        sys.stdout.write(f"\n{table(jobs)}\n")
        folders = [Path(job["folder"]) for job in jobs if job["code"] == 0]
        if done := [f for f in folders if (f / METRICS_FILE).is_file()]:  # none of a dry run
            from dflash_ddp import report

            report.write_report(done, folder / report.FILE)
            sys.stdout.write(f"{folder / report.FILE}\n")
        sys.stdout.flush()
        if len(folders) < len(jobs):
            raise SystemExit(1)
