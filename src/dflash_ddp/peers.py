"""What one rank knows of the others: their last beat and phase, and whether their processes live.

In: the beats and process ids on the job's store. Out: a text that says who is lost, with which the watcher ends the
job. A rank of this node is lost when its process is gone, which shows at once; any rank is when its beat stands still.
"""

import os
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from dflash_ddp.world import Launch, Topology


def process_lives(pid: int) -> bool:
    """Tell whether a process of this machine runs; one that ended but was not waited for does not.

    Where there is no /proc, every process is believed to live: the beats remain.
    """
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


class Peers:
    """The other ranks, as the watcher of this one sees them."""

    def __init__(
        self, launch: Launch, topology: Topology, *, silent_limit_s: float, start_limit_s: float
    ) -> None:
        """Nobody has been seen yet.

        Args:
            launch: this process.
            topology: the roles, for names.
            silent_limit_s: a beat that stands still for so long means that the rank is lost.
            start_limit_s: the same for a rank that has never beaten.
        """
        self._rank, self._topology, self._limits_s = (
            launch.rank,
            topology,
            (silent_limit_s, start_limit_s),
        )
        now = time.monotonic()
        # Rank -> its last beat ("counter|phase"), and when this rank first saw it.
        self._beats = {r: ("", now) for r in range(topology.world_size) if r != launch.rank}
        node = launch.rank // launch.local_world_size
        self._neighbours = [r for r in self._beats if r // launch.local_world_size == node]
        self._pids: dict[int, int] = {}
        # What started this process. Without torchrun it may be a shell, which may end.
        self._launcher = os.getppid() if launch.run_id not in ("none", "local") else None

    def phases(self) -> dict[str, str]:
        """What each of them did at its last beat."""
        return {self._topology.describe(rank): self._phase(rank) for rank in self._beats}

    def _phase(self, rank: int) -> str:
        return self._beats[rank][0].partition("|")[2] or "not started"

    def silent(self, seconds: float) -> list[str]:
        """Names of those whose beat has stood still for so long."""
        still = time.monotonic() - seconds
        return [self._topology.describe(r) for r, (_, at) in self._beats.items() if at < still]

    def gone(self, store: Store) -> str | None:
        """Who of this node has no process any more and was not done, in words; the launcher is one.

        Ranks whose launcher was killed would go on for ever, and nobody could start them anew.
        """
        if self._launcher is not None and os.getppid() != self._launcher:
            who = self._topology.describe(self._rank)
            return f"the launcher of {who} died: its process {self._launcher} is gone"
        for rank in self._neighbours:
            if rank not in self._pids and store.check([f"pid/{rank}"]):
                self._pids[rank] = int(store.get(f"pid/{rank}"))
        for rank, pid in self._pids.items():
            if not process_lives(pid) and not store.check([f"done/{rank}"]):
                self._read(store)  # what it did last
                return (
                    f"{self._topology.describe(rank)} died: its process {pid} is gone (last phase "
                    f"'{self._phase(rank)}'); seen by rank {self._rank}"
                )
        return None

    def _read(self, store: Store) -> None:
        known = [r for r in self._beats if self._beats[r][0] or store.check([f"beat/{r}"])]
        beats = store.multi_get([f"beat/{r}" for r in known]) if known else []
        for rank, beat in zip(known, (beat.decode() for beat in beats), strict=True):
            if beat != self._beats[rank][0]:
                self._beats[rank] = (beat, time.monotonic())

    def lost(self, store: Store) -> str | None:
        """Read all beats, then judge: so a rank that was frozen itself blames nobody."""
        self._read(store)
        now = time.monotonic()
        for rank, (beat, since) in self._beats.items():
            limit_s = self._limits_s[0 if beat else 1]
            if now - since > limit_s and not store.check([f"done/{rank}"]):
                last = f"last phase '{self._phase(rank)}'" if beat else "it never started"
                return (
                    f"{self._topology.describe(rank)} has no heartbeat for {limit_s:.0f} s ({last}):"
                    f" dead, frozen, or its node is gone; seen by rank {self._rank}"
                )
        return None
