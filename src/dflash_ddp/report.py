"""`report.html`: one file that shows a run, or several side by side, without network and without scripts.

    python -m dflash_ddp.report run=<dir>[,<dir>...] [out=<file>]

In: what runs leave behind (`metrics.jsonl`, `config.yaml`, `data_report.json`, all optional but the first). Out: HTML
with inline SVG. Written at the end of every run, and by this command at any time, also of a run that still works.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dflash_ddp import glossary
from dflash_ddp.charts import Points, Series, chart, number
from dflash_ddp.config import ConfigError
from dflash_ddp.log import USER_ERROR, tell
from dflash_ddp.metrics_file import METRICS_FILE, read_rows
from dflash_ddp.settings import command_line

logger = logging.getLogger(__name__)

FILE = "report.html"

# (title, keys): several keys share a chart when they have the same unit.
CHARTS = (
    ("Loss", ("train/loss",)),
    ("Accept length", ("heldout/accept_length", "heldout/walk_on_text", "train/accept_length")),
    ("Throughput", ("speed/tokens_per_s",)),
    ("Waiting", ("wait/target_share", "wait/drafter_share")),
    ("Model FLOP utilisation", ("speed/mfu_target", "speed/mfu_drafter")),
    ("Memory", ("memory/target_gib", "memory/drafter_gib")),
    ("Gradient norm", ("optim/grad_norm",)),
    ("Learning rate", ("optim/lr",)),
)
SUMMARY = (
    "step", "tokens", "train/loss", "train/accuracy", "train/accept_length", "heldout/accept_length",
    "heldout/walk_on_text", "speed/tokens_per_s", "wait/target_share", "wait/drafter_share",
    "memory/target_gib", "memory/drafter_gib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run left behind."""

    name: str
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    data: dict[str, Any]

    def points(self, key: str) -> Points:
        """(step, value) of every row that has the key."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def last(self, key: str) -> float | None:
        """The last value of a key."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def slots(self, prefix: str) -> Points:
        """(slot, value) of `prefix`/slot_k in the last row that has them."""
        key = f"{prefix}/slot_1"
        row: dict[str, Any] = next((row for row in reversed(self.rows) if key in row), {})
        return [
            (k, row[f"{prefix}/slot_{k}"]) for k in range(1, 128) if f"{prefix}/slot_{k}" in row
        ]


def read_run(folder: Path) -> RunRecord:
    """Read a run's directory; a line that is still being written is left out.

    Raises:
        ValueError: it has no metrics.jsonl, or a file of it is damaged.
    """
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"run={folder}: there is no {METRICS_FILE}; give the directory of a run")
    config, data = folder / "config.yaml", folder / "data_report.json"
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        reports = json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"run={folder}: a file is damaged: {error}") from error
    return RunRecord(folder.name, read_rows(folder), flat(settings), reports)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def charts(runs: Sequence[RunRecord]) -> str:
    """All curves: by step, and of the last evaluation by slot. A colour for each run, if several."""
    found = []
    for title, keys in CHARTS:
        used = [key for key in keys if any(run.points(key) for run in runs)]
        metric = glossary.find(keys[0])
        assert metric is not None
        named = [(key, key if len(used) > 1 or len(runs) == 1 else "") for key in used]
        unit = f"{metric.unit}, by step" if metric.unit != "1" else "by step"
        found.append(chart(title, unit, _series(runs, named, RunRecord.points)))
    slots = [("heldout", "accepted on held-out text"), ("train", "right in training")]
    unit = "share, by slot of the block, last values"
    found.append(chart("Acceptance by slot", unit, _series(runs, slots, RunRecord.slots)))
    return "".join(found)


def _series(
    runs: Sequence[RunRecord],
    named: Sequence[tuple[str, str]],
    read: Callable[[RunRecord, str], Points],
) -> list[Series]:
    several = len(runs) > 1
    return [
        Series(
            " ".join(filter(None, (run.name if several else "", name))),
            read(run, key),
            colour=n if several else k,
            dashed=k > 0 if several else False,
        )
        for n, run in enumerate(runs)
        for k, (key, name) in enumerate(named)
    ]


def table(head: Iterable[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A table; a row whose values differ is marked if it compares runs."""
    kind = ' class="words"' if words else ""
    text = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = []
    for row in rows:
        differs = ' class="differs"' if words and len(set(row[1:])) > 1 else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f"<tr{differs}>{cells}</tr>")
    return f"<table{kind}><tr>{text}</tr>{''.join(body)}</table>"


def summary(runs: Sequence[RunRecord]) -> str:
    """The last values, a column a run; of the accept length also the best one and its step."""
    rows = []
    for key in SUMMARY:
        values = [run.last(key) for run in runs]
        if any(value is not None for value in values):
            metric = glossary.find(key)
            assert metric is not None
            cells = ["-" if value is None else number(value) for value in values]
            rows.append([f"{key} ({metric.unit})", *cells])
    best = [
        max(run.points("heldout/accept_length"), key=lambda p: p[1], default=None) for run in runs
    ]
    if any(best):
        cells = [f"{number(b[1])} at step {number(b[0])}" if b else "-" for b in best]
        rows.append(["best heldout/accept_length", *cells])
    return table(["last value", *(run.name for run in runs)], rows)


def data_section(runs: Sequence[RunRecord]) -> str:
    """What became of the rows of text."""
    parts = []
    for run in runs:
        for name, report in run.data.items():
            skipped = ("lengths", "dropped_rows", "dropped_answers")
            rows = [[k, str(v)] for k, v in report.items() if k not in skipped]
            share = report["num_supervised_tokens"] / report["num_tokens"]
            rows.append(["supervised share", number(share)])
            for most, count in report.get("lengths", []):
                rows.append([f"documents of at most {most} tokens", str(count)])
            for title in skipped[1:]:
                for reason, found in report[title].items():
                    what = f"{title.replace('_', ' ')}: {reason}"
                    rows.append([what, f"{found['count']}; first: {found['examples'][0]}"])
            heading = escape(f"{run.name} {name}" if len(runs) > 1 else name)
            body = table(["", ""], rows, words=True)
            parts.append(
                f'<details><summary>{heading}</summary><div class="scroll">{body}</div></details>'
            )
    return "".join(parts) or "<p>No data report in the run's directory.</p>"


def render(runs: Sequence[RunRecord]) -> str:
    """The page."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    cells = [[key, *(str(run.settings.get(key, "-")) for run in runs)] for key in keys]
    if len(runs) > 1:  # what differs comes first
        cells.sort(key=lambda row: len(set(row[1:])) == 1)
    steps = ", ".join(
        f"{run.name}: step {run.last('step')} of {run.settings.get('steps') or '?'}" for run in runs
    )
    template = Template((Path(__file__).parent / FILE).read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(" | ".join(run.name for run in runs)),
        subtitle=escape(steps),
        summary=summary(runs),
        charts=charts(runs),
        data=data_section(runs),
        settings=table(["setting", *(run.name for run in runs)], cells, words=True),
        settings_title="Every setting" + ("; bold: differs" if len(runs) > 1 else ""),
        open="open" if len(runs) > 1 else "",
    )


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write the page of these runs.

    Raises:
        ValueError: a folder holds no run.
        OSError: `out` cannot be written.
    """
    text = render([read_run(folder) for folder in folders])
    out.write_text(text, encoding="utf-8")


def write_or_warn(folder: Path) -> None:
    """At the end of a run, which is complete whether or not this file can be written."""
    try:
        write_report([folder], folder / FILE)
    except (OSError, ValueError) as error:
        logger.warning("no %s: %s", FILE, error)


@dataclass(kw_only=True, slots=True)
class ReportOptions:
    """Which runs, and where to."""

    run: list[str] = field(default_factory=list)
    """Directories of runs, between commas; several are compared."""
    out: str | None = None
    """File to write; null: report.html in the run's directory, or, of several, in that above the first."""


def main() -> None:
    """Write the report of the runs on the command line; print where."""
    try:
        options = command_line(ReportOptions, sys.argv[1:])
        whole = Path(",".join(options.run))  # a sweep's folders have commas in their names
        folders = [whole] if whole.is_dir() else [Path(text) for text in options.run]
        if not options.run:
            raise ConfigError("give run=<dir>[,<dir>...]")
        first = folders[0] if len(folders) == 1 else folders[0].parent
        out = Path(options.out) if options.out else first / FILE
        write_report(folders, out)
    except (ValueError, OSError) as error:
        tell(error)
        raise SystemExit(USER_ERROR) from None
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    main()
