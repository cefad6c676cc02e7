"""Copies of checkpoints somewhere else: any address of fsspec, such as s3://bucket/prefix.

    prefix/step_00000500/...     a checkpoint, as on disk
    prefix/latest                the name of the newest complete one, written last
    prefix/export/...            the final drafter

A thread uploads the newest checkpoint; those that became older meanwhile are left out. What fails is tried again a few
times and then reported: training never waits for it and never ends because of it. Nothing is deleted there.
"""

import logging
import threading
import time
from pathlib import Path

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from dflash_ddp.config import ConfigError
from dflash_ddp.control import Control
from dflash_ddp.log import exit_on_error

logger = logging.getLogger(__name__)

TRIES_S = (2.0, 8.0, 30.0)
"""Pauses between the tries to upload a folder."""
AFTER_STOP_S = 10.0
"""For all that is still to be uploaded when the run is told to stop: torchrun kills ranks 30 s after."""
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl"}  # no folders to make


def check_address(url: str) -> None:
    """Refuse an address that nothing here can write to.

    Raises:
        ConfigError: unknown protocol, or its package is missing.
    """
    try:
        fsspec.get_filesystem_class(get_protocol(url))
    except (ImportError, ValueError) as error:
        hint = "; pip install 'dflash-ddp[s3]'" if url.startswith("s3") else ""
        raise ConfigError(f"checkpoint.upload={url}: {error}{hint}") from None


def upload_folder(folder: Path, url: str, *, marker: bool) -> None:
    """Copy the files of a folder to `url`/name; then, if asked, write `url`/latest.

    Raises:
        Exception: whatever the file system raises.
    """
    system, root = url_to_fs(url)
    protocol = system.protocol
    if _BUCKETS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
        system.makedirs(f"{root}/{folder.name}", exist_ok=True)
    for file in sorted(folder.iterdir()):
        system.put_file(str(file), f"{root}/{folder.name}/{file.name}")
    if marker:
        system.pipe_file(f"{root}/latest", folder.name.encode())


class Uploader:
    """The thread and what waits for it."""

    def __init__(self, url: str, control: Control) -> None:
        """Start with nothing to do."""
        self._url, self._control = url, control
        self.busy: Path | None = None
        """The checkpoint that is being read; it must not be deleted."""
        self._next: Path | None = None
        self._export: Path | None = None
        self._hurried = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def offer(self, checkpoint: Path) -> None:
        """Upload this one next, in place of any that still waits."""
        with self._changed:
            self._next = checkpoint
            self._changed.notify()

    def close(self, export: Path, *, stopped: bool) -> None:
        """Wait for the checkpoint that is due and for the final drafter; after a stop, not for long.

        Args:
            export: the final drafter's folder.
            stopped: the run was told to stop; it may also be told so meanwhile.
        """
        with self._changed:
            self._export = export
            self._changed.notify()
        ends_at = float("inf")
        while self._thread.is_alive():
            if not self._hurried.is_set() and (stopped or self._control.asked("stop")):
                self._hurried.set()
                ends_at = time.monotonic() + AFTER_STOP_S
            self._control.phase(f"upload {(self.busy or export).name}")
            if time.monotonic() > ends_at:
                logger.error("told to stop: the upload of %s is given up", self.busy)
                return
            self._thread.join(0.2)

    def _run(self) -> None:
        with exit_on_error(self._control.fail):
            while True:
                with self._changed:
                    while self._next is None and self._export is None:
                        self._changed.wait()
                    last = self._next is None
                    self.busy, self._next = self._next or self._export, None
                assert self.busy is not None
                self._upload(self.busy, marker=not last)
                if last:
                    return

    def _upload(self, folder: Path, *, marker: bool) -> None:
        start = time.monotonic()
        for pause in (*TRIES_S, None):
            last = pause is None or self._hurried.is_set()
            try:
                upload_folder(folder, self._url, marker=marker)
            except Exception as error:  # noqa: BLE001 (each file system has errors of its own)
                told = f"{folder.name} was not uploaded to {self._url}: {error}"
                if last or self._next is not None:  # a newer one is there
                    logger.error("%s; going on without", told)
                    return
                logger.warning("%s; trying again in %.0f s", told, pause)
                self._hurried.wait(pause)
            else:
                seconds = time.monotonic() - start
                logger.info("uploaded %s to %s, %.1f s", folder.name, self._url, seconds)
                return
