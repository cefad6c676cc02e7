"""Files that outlast a crash of the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Force a file, or a folder's entries, to disk: a rename must not outrun its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
