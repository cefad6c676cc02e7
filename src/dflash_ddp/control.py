"""The control plane: small messages between all ranks, on the job's TCPStore.

In: what a rank does (phase, claims, credits) and what went wrong. Out: the same, seen by all. The
store holds these keys; numbers are counters that only grow:

    beat/{rank}      each second: "counter|phase"; a counter that stands still is a dead rank
    pid/{rank}       its process: ranks of its node see at once when that is gone
    done/{rank}      this rank needs nobody any more, and is not watched from here on
    left             ranks that have stopped to watch; the holder of the store leaves last
    abort            why the job ends; the first cause stays
    said/{key}       a value published for everybody, such as "the data is prepared"
    ticket           the next item of the stream that nobody has claimed
    credit/{d}       batches that drafter d (an ordinal) has had room for since the start
    count/{d}        headers written for drafter d
    header/{d}/{n}   the n-th of them: a batch lies complete on its target rank
    drained          targets that will send nothing more
    ask/{what}       somebody wishes to "stop" or to "save"; the first drafter rank takes it out
    stop             the stream ends before this item

Invariants. All threads of a rank share one connection to the store, which serves one call at a time,
so no call here waits inside the store: a key is read only when it is there, and only one thread of
the job takes it out. Nothing has a time limit but the heartbeats: while every rank beats, waiting is
right. A store that falls silent is found by a thread that does not ask it. A rank that sees `abort`
prints the first cause and ends by `os._exit`, from a thread of its own, since the main thread may
sit in a call that never returns.
"""

import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from dflash_ddp.config import ConfigError
from dflash_ddp.failures import write_failure
from dflash_ddp.jobstore import JobStore
from dflash_ddp.peers import Peers
from dflash_ddp.world import Launch, Topology

if TYPE_CHECKING:  # it knows checkpoints, and they the drafter
    from dflash_ddp.folder import OwnFolder

logger = logging.getLogger(__name__)

EXIT_CODE = 13
"""Exit code of a process that ends because the job ends."""
POLL_S = 0.002
"""Pause between two looks at the store."""
REPORT_EVERY_S = 60.0
"""A wait longer than this is reported, again and again."""
_ABORT_POLL_S = 0.2
_BEAT_S = 1.0
_LEAVE_S = 10.0


class Header(NamedTuple):
    """The message that a batch lies complete on its target rank; its drafter may receive it now.

    `num_bytes` is the exact length of what follows on the lane, `dtype` that of the features, and
    `digest` the CRC-32 of the packed batch, which the drafter compares with its own.
    """

    item: int
    target_rank: int
    num_tokens: int
    num_bytes: int
    dtype: str
    digest: int


def connection_lost(error: BaseException) -> bool:
    """Tell whether an error of torch.distributed says that the other process is gone."""
    words = ("closed by peer", "Connection reset", "Broken pipe", "peer gone")
    return any(word in str(error) for word in words)


class Control:
    """One rank's view of the control plane, and the thread that beats and watches."""

    def __init__(
        self,
        store: JobStore,
        launch: Launch,
        topology: Topology,
        *,
        heartbeat_timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        """Begin to beat.

        Args:
            store: the job's store.
            launch: this process.
            topology: the roles, for the names in messages.
            heartbeat_timeout_s: a beat that stands still for so long ends the job. Well above 10 s
                in real runs: a name server that does not answer can stall the store for 5 s.
            start_timeout_s: the same for a rank that has never beaten.
        """
        self.rank, self.topology = launch.rank, topology
        self.started_at = time.monotonic()
        self._store, self._hosts_store = store.control, launch.hosts_store
        # Whoever may take the store away by its exit leaves the others time to read the cause.
        takes_store = self._hosts_store or launch.local_world_size < launch.world_size
        self._linger_s = 1.5 if takes_store and launch.world_size > 1 else 0.0
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._dying = threading.Lock()
        self._before_exit: list[Callable[[], object]] = []
        self._causes: list[str] = []  # found by this rank, whether first or not
        self._phase = "start"
        self.own_folder: OwnFolder | None = None
        """Where failure.json goes; None until the run has claimed its folder."""
        self._restart = launch.restart_count
        self._rounds = 0  # of the watcher
        self._peers = Peers(
            launch, topology, silent_limit_s=heartbeat_timeout_s, start_limit_s=start_timeout_s
        )
        self._all_done = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._watch_store, name="watch store", daemon=True).start()

    # Life and death of ranks.

    def phase(self, text: str) -> None:
        """Say what this rank does now ("forward item 7"); seen when a peer waits or this fails."""
        self._phase = text

    def phases(self) -> str:
        """Return what the other ranks did at their last beat, in one line."""
        return "; ".join(f"{rank}: {phase}" for rank, phase in self._peers.phases().items())

    def before_exit(self, callback: Callable[[], object]) -> None:
        """Call this (flush a log) when the job is ended by an error. All together get 3 s."""
        self._before_exit.append(callback)

    def fail(self, error: BaseException) -> NoReturn:
        """End the job because of an exception of this rank: for `exit_on_error`."""
        if isinstance(error, ConfigError):  # written for people: a place in the code adds nothing
            self.abort(str(error))
        text, trace = f"{type(error).__name__}: {error}", traceback.format_exception(error)
        if isinstance(error, KeyboardInterrupt):
            text, trace = "interrupted (Ctrl-C)", []
        elif connection_lost(error):
            text += self._silent_peers()
        who = self.topology.describe(self.rank)
        self.abort(f"{who} failed in phase '{self._phase}': {text}", "".join(trace).strip())

    def _silent_peers(self) -> str:
        """Find out who is gone when a connection only says that somebody is: whose beat stands still.

        If it is a process of this node, the watcher finds it first and ends the job meanwhile.
        """
        time.sleep(4 * _BEAT_S)
        silent = self._peers.silent(2.6 * _BEAT_S)
        return f" (no heartbeat from: {', '.join(silent)})" if silent else ""

    def abort(self, cause: str, trace: str = "") -> NoReturn:
        """End the job. The first cause of all ranks wins: every rank ends with that one."""
        self._causes.append(cause)
        try:
            first = self._store.compare_set("abort", "", f"{cause}\n{trace[-1500:]}").decode()
        except RuntimeError as error:
            first = self._lost_store(error)
        self._die(first)

    def _lost_store(self, error: RuntimeError) -> str:
        return (
            f"{self.topology.describe(self.rank)} lost the job's store: the launcher or the "
            f"process that holds it has ended, or the network broke ({error})"
        )

    def _die(self, first: str) -> NoReturn:
        """Print the first cause, once, and leave; any thread may come here first."""
        with self._dying:
            # Eight ranks need not all say the same.
            if self._causes or self.topology.speaks(self.rank):
                logger.critical("the job ends: %s", first.strip())
            for own in self._causes:
                if not first.startswith(own):
                    logger.critical("at the same time here: %s", own)
            is_first = any(map(first.startswith, self._causes))
            if self.own_folder is not None and is_first:
                logger.critical("the others then: %s", self.phases())
            # In a thread: a disk or a network that hangs must not keep this process.
            flush = threading.Thread(target=self._flush, args=(first, is_first), daemon=True)
            flush.start()
            flush.join(3.0)
            time.sleep(self._linger_s)
            os._exit(EXIT_CODE)

    def _flush(self, first: str, is_first: bool) -> None:
        own = self.own_folder
        if is_first and own is not None and not own.is_lost():
            phases = {self.topology.describe(self.rank): self._phase} | self._peers.phases()
            write_failure(own.path, first, phases=phases, restart=self._restart)
        for callback in self._before_exit:
            callback()

    def _watch(self) -> None:
        """Beat, look for the abort flag and at the beats of the others, until closed."""
        count, beaten, next_beat = 0, "", 0.0
        while not self._closing.wait(_ABORT_POLL_S if count else 0):
            try:
                if not count:
                    self._store.set(f"pid/{self.rank}", str(os.getpid()))
                if self._store.check(["abort"]):
                    self._die(self._store.get("abort").decode())
                due = time.monotonic() >= next_beat
                if due or self._phase != beaten:
                    count, beaten = count + 1, self._phase
                    self._store.set(f"beat/{self.rank}", f"{count}|{beaten}")
                cause = self._peers.gone(self._store)
                if due:
                    next_beat = time.monotonic() + _BEAT_S
                    cause = cause or self._peers.lost(self._store)
                if cause is not None:
                    self.abort(cause)
                self._rounds += 1
            except RuntimeError as error:
                if self._all_done:  # its host has left, as it may
                    self._closing.set()
                    return
                lost = self._lost_store(error)
                self._causes.append(lost)
                self._die(lost)

    def _watch_store(self) -> None:
        """End if the store does not answer: its host is frozen, so no call of the watcher returns."""
        seen, seconds = 0, 0.0
        while not self._closing.wait(_BEAT_S):
            # Counted in waits that came back: if this process was frozen, few did.
            seen, seconds = self._rounds, seconds + _BEAT_S if seen == self._rounds else 0.0
            if seconds > self._heartbeat_timeout_s:
                silent = f"the job's store has not answered for {seconds:.0f} s"
                self._causes.append(silent)
                self._die(silent)

    # Start and end of the run.

    def publish(self, key: str, value: str = "") -> None:
        """Give all ranks a value ("data", "prepared"); the last one published stays."""
        self._store.set(f"said/{key}", value)

    def said(self, key: str) -> str | None:
        """Return the value last published under a key, or None."""
        return self._read(f"said/{key}")

    def _read(self, key: str, *, take: bool = False) -> str | None:
        """A value of the store, taken out if wished; None if there is none."""
        if not self._store.check([key]):
            return None
        value = self._store.get(key).decode()
        if take:
            self._store.delete_key(key)
        return value

    def wait_for(self, key: str, what: str) -> str:
        """Wait until a value is published, as long as all ranks beat; `what` is for people."""
        self._wait_until([f"said/{key}"], what)
        return self._store.get(f"said/{key}").decode()

    def _wait_until(self, keys: list[str], what: str) -> None:
        """Poll, and say now and then who is waited for; the watcher sees the abort flag."""
        start = reported = time.monotonic()
        while not self._store.check(keys):
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("waiting %.0f s for %s (%s)", reported - start, what, self.phases())
            time.sleep(10 * POLL_S)

    def ask(self, what: str, told: str) -> None:
        """Wish for a "stop" or a "save", because of `told`; see `dflash_ddp.stopping`."""
        self._store.set(f"ask/{what}", told)

    def asked(self, what: str) -> str | None:
        """Take such a wish out of the store; None if there is none."""
        return self._read(f"ask/{what}", take=True)

    def done(self) -> None:
        """Say that this rank needs nobody any more; its heart is not watched from here on."""
        self.phase("done")
        self._store.add(f"done/{self.rank}", 1)

    def wait_all_done(self) -> None:
        """Wait until every rank is done. Then, and not before, groups may be destroyed."""
        self._wait_until(
            [f"done/{rank}" for rank in range(self.topology.world_size)], "all ranks to be done"
        )
        self._all_done = True

    def close(self) -> None:
        """Stop watching, after `wait_all_done`. The store's host leaves last (it waits 10 s at most)."""
        self._closing.set()
        self._watcher.join()
        end = time.monotonic() + _LEAVE_S
        with suppress(RuntimeError):  # whoever takes longer finds no store, and needs none
            num_left = self._store.add("left", 1)
            while self._hosts_store and num_left < self.topology.world_size:
                if time.monotonic() > end:
                    break
                time.sleep(10 * POLL_S)
                num_left = self._store.add("left", 0)

    # The stream: tickets, credits, headers.

    def claim(self) -> int:
        """Take the next ticket: 0, 1, 2, ... over all target ranks."""
        return self._store.add("ticket", 1) - 1

    def grant(self, drafter: int, num_batches: int) -> None:
        """Tell the targets that this drafter (ordinal) has room for so many batches more."""
        self._store.add(f"credit/{drafter}", num_batches)

    def credit(self, drafter: int) -> int:
        """Return how many batches this drafter has had room for: sequence s needs s < credit."""
        return self._store.add(f"credit/{drafter}", 0)

    def announce(self, drafter: int, header: Header) -> None:
        """Write a header. Headers of one target are seen in the order of these calls."""
        number = self._store.add(f"count/{drafter}", 1) - 1
        self._store.set(f"header/{drafter}/{number}", json.dumps(header))

    def header(self, drafter: int, number: int) -> Header | None:
        """Take header 0, 1, ... of a drafter out of the store; None if it is not there yet."""
        fields = self._read(f"header/{drafter}/{number}", take=True)
        return None if fields is None else Header(*json.loads(fields))

    def drained(self) -> None:
        """Say that this target sends nothing more; from the thread that announces."""
        self._store.add("drained", 1)

    def num_drained(self) -> int:
        """Return how many targets send nothing more."""
        return self._store.add("drained", 0)

    def request_stop(self, item: int) -> None:
        """End the stream before `item`. The first request stays."""
        self._store.compare_set("stop", "", str(item))

    def stop_item(self) -> int | None:
        """The item before which the stream ends, or None."""
        item = self._read("stop")
        return None if item is None else int(item)
