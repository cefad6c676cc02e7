"""What became of the rows of a data set: counted by reason, and said in a few lines.

The report is a dict that is saved beside the documents. num_rows is num_rows_kept + the counts in
dropped_rows; num_bad_rows are those dropped for malformed data and not for their length;
dropped_answers are answers of kept rows; `lengths` pairs a number of tokens with the number of
documents that have at most so many, and more than the pair before.
"""

from typing import Any

import numpy as np

from dflash_ddp.data.reading import Rejected
from dflash_ddp.data.rendering import HARMLESS, Document, RenderSettings

MAX_EXAMPLES, MAX_REASONS = 3, 40  # of rows left out
_BINS = 8
_MODES = {None: "the template's default", True: "on", False: "off"}


def new_report(sources: list[str], settings: RenderSettings) -> dict[str, Any]:
    """A report of no rows."""
    return {
        "sources": sources,
        "enable_thinking": settings.enable_thinking,
        "eos_ids": sorted(settings.eos_ids),
        "max_length": settings.max_length,
        "num_rows": 0,
        "num_rows_kept": 0,
        "num_bad_rows": 0,
        "num_truncated": 0,
        "num_documents": 0,
        "num_tokens": 0,
        "num_supervised_tokens": 0,
        "dropped_rows": {},
        "dropped_answers": {},
        "lengths": [],
    }


def count_row(
    report: dict[str, Any], place: str, documents: list[Document], rejected: list[Rejected]
) -> None:
    """Add one row."""
    report["num_rows"] += 1
    for document in documents:
        report["num_documents"] += 1
        report["num_tokens"] += len(document.ids)
        report["num_truncated"] += document.truncated
        report["num_supervised_tokens"] += int(document.loss_mask.sum())
    if documents:
        report["num_rows_kept"] += 1
        for refusal in rejected:
            _count(report["dropped_answers"], refusal, place)
    else:
        # One reason a row, so that reasons add up to rows. Bad data comes first.
        refusal = min(rejected, key=lambda rejected: rejected.reason in HARMLESS)
        report["num_bad_rows"] += refusal.reason not in HARMLESS
        _count(report["dropped_rows"], refusal, place)


def _count(table: dict[str, Any], refusal: Rejected, place: str) -> None:
    reason = refusal.reason
    if reason not in table and len(table) >= MAX_REASONS:
        reason = "other reasons"
    found = table.setdefault(reason, {"count": 0, "examples": []})
    found["count"] += 1
    if len(found["examples"]) < MAX_EXAMPLES:
        found["examples"].append(f"{place}: {refusal.detail or refusal.reason}")


def length_bins(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Pairs [most tokens, documents], each bin twice as wide as the one before."""
    edges = sorted({max(1, max_length >> halvings) for halvings in range(_BINS)})
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    return [[edge, int(count)] for edge, count in zip(edges, counts, strict=True)]


def format_report(report: dict[str, Any]) -> str:
    """The report as a few lines for people."""
    share = report["num_supervised_tokens"] / max(report["num_tokens"], 1)
    bins = [f"<={edge}: {count}" for edge, count in report["lengths"] if count]
    lines = [
        f"rows: {report['num_rows']} read, {report['num_rows_kept']} kept; "
        f"thinking: {_MODES[report['enable_thinking']]}",
        f"documents: {report['num_documents']} of {report['num_tokens']} tokens, {share:.1%} of "
        f"them supervised; {report['num_truncated']} cut at {report['max_length']} tokens",
        f"documents by tokens: {'  '.join(bins) or 'none'}",
    ]
    for title in ("dropped_rows", "dropped_answers"):
        for reason, found in sorted(report[title].items(), key=lambda item: -item[1]["count"]):
            name, first = title.replace("_", " "), "; ".join(found["examples"])
            lines.append(f"{name}: {found['count']} x {reason} (first: {first})")
    return "\n".join(lines)
