"""The job's TCPStore, as the ranks of one start share it.

In: a launch. Out: stores under a prefix that is equal on all ranks, and new in each restart.
"""

import time

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dflash_ddp.world import START_LIMIT, Launch


def _generation(store: TCPStore, launch: Launch) -> int:
    """How often the ranks were started; equal on all of them, as rank 0 counts and others wait for it.

    torchrun's own count is not: it leaves out restarts that another node brought about.

    Raises:
        TimeoutError: rank 0 does not start.
    """
    ours, end = f"dflash/{launch.run_id}", time.monotonic() + START_LIMIT.total_seconds()
    least = launch.restart_count + 1  # what torchrun counts has happened
    if launch.rank == 0:
        return store.add(f"{ours}/starts", max(1, least - store.add(f"{ours}/starts", 0)))
    joined = store.add(f"{ours}/joined/{launch.rank}", 0)
    while (found := store.add(f"{ours}/starts", 0)) < max(joined + 1, least):
        if time.monotonic() > end:
            raise TimeoutError(f"rank {launch.rank}: rank 0 has not started within {START_LIMIT}")
        time.sleep(0.02)
    store.add(f"{ours}/joined/{launch.rank}", found - joined)
    return found


class JobStore:
    """The job's TCPStore; keys lie under run id and generation: a restart finds none of the old.

    Two connections: torch's groups wait inside the store for minutes, and hold the lock of theirs
    meanwhile. Both are opened at once, before anything runs: a new one can stall the store for
    seconds where its host asks a name server that does not answer.
    """

    def __init__(self, launch: Launch) -> None:
        """Reach the store, after starting it if no agent holds it.

        Raises:
            torch.distributed.DistError: nobody answers, or the port is taken; names host and port.
            TimeoutError: rank 0 does not start.
        """

        def connect(port: int, *, is_master: bool) -> TCPStore:
            return TCPStore(
                launch.store_host,
                port,
                world_size=launch.world_size,  # without it, torch lets a retry wait up to 30 s
                is_master=is_master,
                wait_for_workers=False,
                timeout=START_LIMIT,
            )

        first = connect(launch.store_port, is_master=launch.hosts_store)
        second = connect(first.port, is_master=False)
        prefix = f"dflash/{launch.run_id}/{_generation(first, launch)}"
        self.control = PrefixStore(f"{prefix}/control", first)
        """For `Control`, all threads of it; on the host it holds the server."""
        self.groups = PrefixStore(f"{prefix}/groups", second)
        """For torch's process groups."""
        self.launch = PrefixStore(f"dflash/{launch.run_id}", first)
        """For what a restart shall find; the store ends with its launch."""
