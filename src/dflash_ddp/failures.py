"""What a run that failed leaves behind: `failure.json`, with the first cause and the phase of each rank."""

import json
import logging
import time
from pathlib import Path

from dflash_ddp.disk import write_whole
from dflash_ddp.redaction import redact

logger = logging.getLogger(__name__)

FAILURE_FILE = "failure.json"


def write_failure(folder: Path, first: str, *, phases: dict[str, str], restart: int) -> None:
    """Write failure.json, whole or not at all; that it cannot be written is a warning.

    Args:
        folder: the run's.
        first: the first cause of all ranks; below its first line where in the code, if anywhere.
        phases: what each rank did at its last beat.
        restart: how often the launcher had started the ranks anew.
    """
    cause, _, trace = first.partition("\n")
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    failure = {"at": at, "restart": restart, "cause": redact(cause), "trace": redact(trace)}
    failure["phases"] = phases
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FAILURE_FILE, redact(json.dumps(failure, indent=2)) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / FAILURE_FILE, error)
