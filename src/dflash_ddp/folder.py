"""The run's folder: taken by one run at a time, once all is checked, and nothing of a run is written elsewhere."""

import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from dflash_ddp.checkpoint import remove_leftovers
from dflash_ddp.config import Config, ConfigError
from dflash_ddp.disk import write_whole
from dflash_ddp.redaction import redact
from dflash_ddp.settings import resolved

logger = logging.getLogger(__name__)

_ENVIRONMENT_FILE = "env.json"


def check_links(folder: Path) -> None:
    """ConfigError if what the run would write goes elsewhere, by a link inside its folder."""
    place = folder.resolve()
    for entry in [*folder.iterdir(), *folder.glob("checkpoints/*")]:
        if entry.is_symlink() and not entry.resolve().is_relative_to(place):
            raise ConfigError(
                f"{entry} is a link to {entry.resolve()}, outside of output_dir={folder}, where "
                "all of the run is written; give output_dir itself the place that you want"
            )


_held: set[int] = set()  # inodes; their locks end with the process


def hold_folder(folder: Path) -> None:
    """Keep other runs out of a folder as long as this process lives.

    Raises:
        ConfigError: a run has it.
    """
    if folder.stat().st_ino in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.add(folder.stat().st_ino)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"output_dir={folder} is in use by another run; give this one another name"
        ) from None
    except OSError as error:  # some network file systems lock no folders
        logger.warning("%s cannot be locked (%s): start no second run in it", folder, error)


class FolderLostError(RuntimeError):
    """The run's folder was removed while it worked, and another run has begun in one of that name."""


class OwnFolder:
    """The run's folder as this process found it, since its name may come to mean another run's.

    `hold_folder` locks a folder, not a name: whoever removes the folder removes the lock with it.
    """

    def __init__(self, path: Path) -> None:
        """Remember the folder; rank 0 has claimed it. Nodes that do not share it have none yet."""
        self.path = path
        self._own: os.stat_result | None = None
        self._making = threading.Lock()  # rows and checkpoints are written by two threads
        with suppress(OSError):
            self._remember()

    def _remember(self) -> None:
        # It stays open: as long as it does, no other folder is given its inode.
        self._own = os.fstat(os.open(self.path, os.O_RDONLY))

    def _is_own(self, found: os.stat_result) -> bool:
        return self._own is not None and os.path.samestat(self._own, found)

    def is_lost(self) -> bool:
        """Whether another run has claimed a folder in its place; none there, or nobody's, is not that."""
        try:
            return not self._is_own(self.path.stat()) and (self.path / _ENVIRONMENT_FILE).exists()
        except OSError:
            return False

    def check(self) -> None:
        """Before a write: FolderLostError if it would go into another run's folder."""
        if self.is_lost():
            raise self._lost()

    def keep(self) -> None:
        """Before whoever logs or saves writes: if the folder is gone, make it anew and lock that one.

        Raises:
            OSError: it cannot be made now.
            FolderLostError: another run has it.
        """
        with self._making:
            self.check()
            if self._own is not None and not self.path.exists():
                logger.warning("%s is gone: it is made anew, without what was in it", self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            if self._is_own(self.path.stat()):
                return
            try:
                hold_folder(self.path)
            except ConfigError:  # another run is about to claim it
                raise self._lost() from None
            self._remember()

    def _lost(self) -> FolderLostError:
        return FolderLostError(
            f"{self.path} was removed while this run worked, and another run has begun in a folder "
            "of that name: this one ends and leaves it alone; give each run a name of its own"
        )


def claimed_by(config: Config) -> str | None:
    """The launch that wrote into the run's folder last; None if nobody did."""
    try:
        return json.loads((Path(config.output_dir) / _ENVIRONMENT_FILE).read_bytes()).get("launch")
    except (OSError, ValueError):  # none, or one that a full disk or a crash has cut
        return None


def check_writable(folder: Path, key: str) -> None:
    """ConfigError if nothing can be written there, or where it would be made; nothing is left there."""
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot write in {parent}: {error.strerror}") from error


def claim_folder(config: Config, data_report: dict[str, Any], launch: str) -> None:
    """Take the run's folder, once all is checked: a run that is refused has changed nothing in it.

    With resume=none an earlier run is moved aside, never mixed. What a killed save left is deleted.
    Writes config.yaml (every setting as resolved), env.json (with what this ran, in which launch)
    and data_report.json.
    """
    folder = Path(config.output_dir)
    if folder.is_dir():
        hold_folder(folder)
    if config.resume == "none" and (folder / "config.yaml").exists():
        names = (folder.with_name(f"{folder.name}.{n}") for n in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        shutil.move(folder, aside)
        logger.info("resume=none: the earlier run is now in %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    hold_folder(folder)
    remove_leftovers(folder / "checkpoints")
    text = json.dumps(data_report, indent=2) + "\n"
    write_whole(folder / "data_report.json", text)
    write_whole(folder / "config.yaml", yaml.safe_dump(resolved(config), sort_keys=False))
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    argv = [redact(word) for word in sys.argv]
    environment: dict[str, Any] = {"launch": launch, "argv": argv, "python": sys.version}
    environment |= {"torch": torch.__version__, "gpu": gpu}
    write_whole(folder / _ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
