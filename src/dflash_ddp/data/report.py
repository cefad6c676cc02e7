"""What became of the rows: counted while tokenising, kept as `report.json`, shown to people.

In: chunks of tokenised rows. Out: one dict of plain values. Rows and answers left out are counted
by reason, with the first few examples as `file:line` or `name[row]`.

Invariants: num_rows = num_rows_kept + the counts in dropped_rows; dropped_answers are answers of
kept rows; num_bad_rows are dropped rows whose reason is malformed data and not a matter of length.
"""

from typing import Any

import numpy as np

from dflash_ddp.data.reading import Source, place
from dflash_ddp.data.rendering import HARMLESS, RenderSettings
from dflash_ddp.data.tokenising import Tokenised

_MAX_EXAMPLES = 3
_MAX_REASONS = 40
_OTHER = "other reasons"


class ReportBuilder:
    """Adds up chunks; `report` is complete after `finish`."""

    def __init__(self, sources: list[Source], tokenizer: str, *, settings: RenderSettings) -> None:
        self._sources = sources
        self.report: dict[str, Any] = {
            "sources": [[source.name, source.kind.value] for source in sources],
            "tokenizer": tokenizer,
            "enable_thinking": settings.enable_thinking,
            "eos_ids": sorted(settings.eos_ids),
            "max_length": settings.max_length,
            "num_rows": 0,
            "num_rows_kept": 0,
            "num_bad_rows": 0,
            "num_documents": 0,
            "num_truncated": 0,
            "num_tokens": 0,
            "num_supervised_tokens": 0,
            "dropped_rows": {},
            "dropped_answers": {},
        }

    def add(self, chunk: Tokenised) -> None:
        """Count one chunk."""
        dropped = [refusal for refusal in chunk.refusals if refusal.whole_row]
        bad = [refusal for refusal in dropped if refusal.rejected.reason not in HARMLESS]
        for name, count in (
            ("num_rows", chunk.num_rows),
            ("num_rows_kept", chunk.num_rows - len(dropped)),
            ("num_bad_rows", len(bad)),
            ("num_documents", len(chunk.lengths)),
            ("num_truncated", chunk.num_truncated),
            ("num_tokens", len(chunk.ids)),
            ("num_supervised_tokens", int(chunk.loss_mask.sum())),
        ):
            self.report[name] += count
        for refusal in chunk.refusals:
            table = self.report["dropped_rows" if refusal.whole_row else "dropped_answers"]
            reason = refusal.rejected.reason
            if reason not in table and len(table) >= _MAX_REASONS:
                reason = _OTHER
            entry = table.setdefault(reason, {"count": 0, "examples": []})
            entry["count"] += 1
            if len(entry["examples"]) < _MAX_EXAMPLES:
                source = self._sources[refusal.source]
                where = place(source.name, source.kind, refusal.row)
                entry["examples"].append(f"{where}: {refusal.rejected.detail or reason}")

    def finish(self, fingerprint: str, version: int, lengths: np.ndarray) -> dict[str, Any]:
        """The whole report; lengths int64 [d] give the histogram, by powers of two."""
        edges = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        bins, counts = np.unique(edges, return_counts=True)
        histogram = {f"<={edge}": int(count) for edge, count in zip(bins, counts, strict=True)}
        head = {"format": version, "fingerprint": fingerprint}
        self.report = head | self.report | {"length_histogram": histogram}
        return self.report


def format_report(report: dict[str, Any]) -> str:
    """The report as a few lines for people."""
    mode = {None: "the template's default", True: "on", False: "off"}[report["enable_thinking"]]
    share = report["num_supervised_tokens"] / max(report["num_tokens"], 1)
    lengths = ", ".join(f"{edge}: {num}" for edge, num in report["length_histogram"].items())
    lines = [
        f"rows: {report['num_rows']} read, {report['num_rows_kept']} kept",
        f"documents: {report['num_documents']} of {report['num_tokens']} tokens, {share:.1%} of "
        f"them supervised; {report['num_truncated']} cut at {report['max_length']} tokens",
        f"thinking: {mode}; lengths: {lengths}",
    ]
    lines += _reasons("rows dropped", report["dropped_rows"])
    lines += _reasons("answers dropped from kept rows", report["dropped_answers"])
    return "\n".join(lines)


def refuse_empty(report: dict[str, Any]) -> None:
    """Raise ValueError, with the counts by reason, if no document is left."""
    if report["num_documents"] == 0:
        names = ", ".join(name for name, _ in report["sources"])
        reasons = "\n".join(_reasons("rows dropped", report["dropped_rows"]))
        raise ValueError(f"no usable row among the {report['num_rows']} of {names}\n{reasons}")


def check_bad_share(report: dict[str, Any], max_bad_share: float) -> None:
    """Raise ValueError, with the counts by reason, if too many rows are bad data."""
    share = report["num_bad_rows"] / report["num_rows"]
    if share > max_bad_share:
        reasons = "\n".join(_reasons("rows dropped", report["dropped_rows"]))
        raise ValueError(
            f"{report['num_bad_rows']} of {report['num_rows']} rows are bad ({share:.1%}), more "
            f"than data.max_bad_share={max_bad_share}; mend the data or raise it\n{reasons}"
        )


def _reasons(title: str, table: dict[str, Any]) -> list[str]:
    ordered = sorted(table.items(), key=lambda item: -item[1]["count"])
    return [
        f"{title}: {entry['count']} x {reason} (first: {entry['examples'][0]})"
        for reason, entry in ordered
    ]
