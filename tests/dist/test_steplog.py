"""A row's seconds: of steps alone, whatever is done between them."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dflash_ddp.drafter.metrics import empty_sums
from dflash_ddp.drafter.steplog import StepLog
from dflash_ddp.world import Topology

pytestmark = pytest.mark.dist

STEP_S, PAUSE_S = 0.1, 0.5


def log_two_rows(rank: int, reaching_s: float) -> list[dict]:
    """Two rows of two steps each; a pause before the first step and between steps.

    reaching_s: of each pause, the target waits so long at its end, and says it when it goes on.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    waited, rows, said = {"target": 7.0, "drafter": 5.0}, [], SimpleNamespace()
    state, unsaid = "", 0.0
    said.said = lambda key: f"{waited['target']}{state}" if key == "wait/0" else None
    world = SimpleNamespace(device=torch.device("cpu"), drafter_group=None, rank=1)
    world.topology = Topology((0,), (1,), colocated=False)
    log = StepLog(
        world,
        said,
        SimpleNamespace(write=rows.append),
        block_size=4,
        tokens=0,
        wait_s=lambda: waited["drafter"],
        more=lambda step: {},
    )
    for step in range(4):
        if step in (0, 1, 3):
            with log.pause():
                time.sleep(PAUSE_S)
                waited = {"target": waited["target"] + 100, "drafter": waited["drafter"] + 100}
                state, unsaid = " waiting" if reaching_s else "", reaching_s
        time.sleep(STEP_S)
        waited = {"target": waited["target"] + unsaid + 0.02, "drafter": waited["drafter"] + 0.03}
        state, unsaid = "", 0.0
        log.add(empty_sums(4, world.device))
        log.end_step(torch.ones(()))
        if step % 2:
            log.measure(step + 1, lr=0.0, slots_full=0)
    log.write()
    return rows


@pytest.mark.parametrize(
    ("reaching_s", "least"),
    [(0.0, 0.02), (PAUSE_S, 0.015), (0.3, 0.0)],
    ids=["ended inside", "all the pause", "since some time in it"],
)
def test_pauses_are_neither_time_of_steps_nor_waiting_in_them(reaching_s, least):
    """Of a wait that began in a pause and reaches out of it, less may be counted than was outside, never more."""
    (outcome,) = run_ranks(log_two_rows, 1, reaching_s)
    assert [row["step"] for row in outcome.value] == [2, 4]
    for row in outcome.value:
        assert STEP_S <= row["speed/step_s"] < STEP_S + PAUSE_S / 2
        assert least - 1e-6 <= row["wait/target"] <= 0.02 + 1e-6
        assert row["wait/drafter"] == pytest.approx(0.03)
