"""`report.html`: one file that shows a run, or several side by side, without network and without scripts.

    python -m dflash_ddp.report run=<dir>[,<dir>...] [out=<file>]

In: what runs leave behind (`metrics.jsonl`, `config.yaml`, `data_report.json`, all optional but the first). Out: HTML
with inline SVG. Written at the end of every run, and by this command at any time, also of a run that still works.
"""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

from dflash_ddp import glossary
from dflash_ddp.metrics_file import METRICS_FILE, read_rows

logger = logging.getLogger(__name__)

FILE = "report.html"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 230, 52, 24, 10
MAX_POINTS = 240  # of a line
COLOURS = 8
OUTLIERS = 0.02  # share of a curve's values that may lie above its axis: the first losses

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

Points = list[tuple[float, float]]


class Series(NamedTuple):
    """One line: its name in the legend, where, which colour, and whether it is dashed."""

    name: str
    points: Points
    colour: int
    dashed: bool = False

    @property
    def stroke(self) -> str:
        """Attributes of what is drawn."""
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        return f'stroke="var(--c{self.colour % COLOURS})"{dash}'


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


def thinned(points: Points) -> Points:
    """At most `MAX_POINTS`, each the mean of its neighbours; the last one stays as it is."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points) - 1, size)]
    means = [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
    return [*means[:-1], points[-1]]


def ticks(low: float, high: float, number: int = 4) -> list[float]:
    """Round values from low to high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [round(n * step, 12) for n in range(first, math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """A number for people."""
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def chart(title: str, unit: str, series: Sequence[Series]) -> str:
    """A line chart as a figure; '' without points."""
    shown = [one._replace(points=thinned(one.points)) for one in series if one.points]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    ys = sorted(y for one in shown for _, y in one.points)
    top = ys[max(0, math.ceil(len(ys) * (1 - OUTLIERS)) - 1)]
    y_ticks = ticks(min(0.0, ys[0]) if ys[0] < top / 2 else ys[0], top)
    x_ticks = [x for x in ticks(min(xs), max(xs), 5) if x <= max(xs)]
    x0, x1 = min(min(xs), x_ticks[0]), max(max(xs), x_ticks[0] + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        down = (y_ticks[-1] - min(y, y_ticks[-1])) / (y_ticks[-1] - y_ticks[0])
        right = (x - x0) / (x1 - x0)
        return LEFT + right * (WIDTH - LEFT - 12), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in y_ticks:
        at = place(x0, y)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in x_ticks:
        at = place(x, y_ticks[0])[0]
        anchor = "end" if at > WIDTH - 30 else "middle"
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{number(x)}</text>'
        )
    parts += [_curve(one, [place(x, y) for x, y in one.points]) for one in shown]
    legend = "".join(
        f'<span><svg viewBox="0 0 18 4"><path d="M0 2H18" {one.stroke} stroke-width="3"/></svg>'
        f"{escape(one.name)} {number(one.points[-1][1])}</span>"
        for one in shown
    )
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(unit)}</small></figcaption>"
        f'<div class="legend">{legend}</div><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}, {escape(unit)}">{"".join(parts)}</svg></figure>'
    )


def _curve(series: Series, places: Points) -> str:
    """A line, and a spot at each point that says its value."""
    alone = len(places) == 1  # a line needs two ends
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places * (2 if alone else 1))
    ends = ' class="point"' if alone else ""
    spots = [
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5"><title>{escape(series.name)}, {number(x)}: '
        f"{number(y)}</title></circle>"
        for (px, py), (x, y) in zip(places, series.points, strict=True)
    ]
    return f'<polyline points="{line}"{ends} {series.stroke}/>{"".join(spots)}'


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


def main() -> None:
    """Write the report of the runs on the command line; print where."""
    options = dict(word.partition("=")[::2] for word in sys.argv[1:])
    folders = [Path(text) for text in options.get("run", "").split(",") if text]
    if not folders or options.keys() - {"run", "out"}:
        raise SystemExit("usage: python -m dflash_ddp.report run=<dir>[,<dir>...] [out=<file>]")
    first = folders[0] if len(folders) == 1 else folders[0].parent
    out = Path(options.get("out", first / FILE))
    try:
        write_report(folders, out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"dflash_ddp: {error}") from None
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    main()
