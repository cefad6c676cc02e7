"""Files that are whole or not there, and outlast a crash of the machine."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Force a file, or a folder's entries, to disk: a rename must not outrun its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, text: str) -> None:
    """Write a small file under another name, then rename it: nobody ever meets a part of it."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    flush(part)
    part.rename(file)
    flush(file.parent)
