"""A target rank's program: claim an item, compute its context features into a slot, send them."""

import logging
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_ddp.batch import PackedBatch
from dflash_ddp.channel import FeatureSender
from dflash_ddp.compiling import compile_now, require_compiler, require_main_thread
from dflash_ddp.control import Control
from dflash_ddp.costs import SENDER_SLOTS
from dflash_ddp.profiling import StepProfiler, peak_gib
from dflash_ddp.startup import Run
from dflash_ddp.target.capture import Target, check_features, compile_rows
from dflash_ddp.target.compiled import compile_layers
from dflash_ddp.target.model import load_target, random_target
from dflash_ddp.target.tables import read_config
from dflash_ddp.world import World

logger = logging.getLogger(__name__)


class FeatureSource:
    """The frozen target as a function: packed batch -> context features, checked on the first."""

    def __init__(self, run: Run, device: torch.device) -> None:
        """Load the target; compile its layers on GPUs unless switched off."""
        config, start = run.config.target, time.monotonic()
        model = _load(run, device)
        compiled = device.type == "cuda" if config.compile is None else config.compile
        if compiled:
            require_compiler()
            compile_layers(model)
        self._target = Target(model, run.found.capture_layers, max_row_tokens=config.row_tokens)
        self._checked = False
        logger.info("target %s is loaded, %.0f s", config.path, time.monotonic() - start)
        if compiled:
            graphs = f"{model.config.to_json_string()} {run.feature_dtype}"
            compile_now("the target", graphs, lambda: compile_rows(self._target))

    def features(self, batch: PackedBatch, out_SC: Tensor) -> None:
        """Write the features of `batch` into the first n rows of `out_SC` [S, C].

        Raises:
            ValueError: the first batch's features do not equal a plain forward's.
        """
        require_main_thread("the target")
        self._target.features(batch, out_SC)
        if not self._checked:
            check_features(self._target, batch, out_SC)
            self._checked = True


def _load(run: Run, device: torch.device) -> PreTrainedModel:
    config, layers, dtype = run.config.target, run.found.capture_layers, run.feature_dtype
    if config.random_weights:
        return random_target(
            read_config(config.path, config.revision, config.trust_remote_code),
            capture_layers=layers,
            dtype=dtype,
            device=device,
            seed=run.config.seed,
            attention=config.attention,
        )
    return load_target(
        config.path,
        config.revision,
        capture_layers=layers,
        dtype=dtype,
        device=device,
        attention=config.attention,
        trust_remote_code=config.trust_remote_code,
    )


def stream_features(run: Run, world: World, control: Control) -> None:
    """Compute and send items until the stream ends."""
    control.phase("load target")
    source = FeatureSource(run, world.device)
    sender = FeatureSender(
        world,
        control,
        run.schedule,
        num_slots=SENDER_SLOTS,
        slot_bytes=run.slot_bytes,
        dtype=str(run.feature_dtype),
    )
    name, wanted = f"target_rank{world.rank}", world.rank == world.topology.target_ranks[0]
    first = run.found.first_step
    profiler = StepProfiler(run.config, first, world.device, name, wanted=wanted)
    waited = f"wait/{world.rank}"
    while (claim := sender.acquire()) is not None:
        control.publish(waited, f"{sender.wait_slot_s:.3f}")
        control.phase(f"forward item {claim.item}")
        item = run.schedule.item(claim.item)
        profiler.at(item.step)
        batch = run.load(item)
        source.features(batch, run.slot_features(claim.slot))
        sender.send(
            claim,
            num_bytes=run.feature_bytes(batch.num_tokens),
            num_tokens=batch.num_tokens,
            digest=batch.digest(),
        )
        control.publish(waited, f"{sender.wait_slot_s:.3f} waiting")
        control.publish(f"memory/{world.rank}", f"{peak_gib(world.device) or ''}")
        control.phase("wait for a free slot")
    profiler.close()
    sender.drain()
