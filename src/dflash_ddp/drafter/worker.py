"""A drafter rank's program: receive features, forward and backward, optimizer step; evaluate, log, save.

The loop asks the GPU nothing in a steady step: blocks and weights are known on the host, sums of metrics stay on the
device, and a row of the log is read one step after it was measured.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dflash_ddp.accept import AcceptTally
from dflash_ddp.batch import PackedBatch
from dflash_ddp.channel import Received
from dflash_ddp.checkpoint import (
    TrainerState,
    load_tensors,
    read_state,
    save_checkpoint,
)
from dflash_ddp.compiling import require_compiler, use_cache
from dflash_ddp.control import Control
from dflash_ddp.costs import find_gpu
from dflash_ddp.drafter.blocks import make_blocks, sample_anchors
from dflash_ddp.drafter.heldout import tally_batch
from dflash_ddp.drafter.inputs import HostInputs, host_inputs, to_device
from dflash_ddp.drafter.metrics import microbatch_sums
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.optim import clip_gradients, lr_multiplier, make_optimizer, set_lr
from dflash_ddp.drafter.step import (
    LossSettings,
    Tables,
    compile_step,
    forward_backward,
    resolve_recompute,
)
from dflash_ddp.drafter.steplog import StepLog
from dflash_ddp.export import native_config, save_native
from dflash_ddp.facts import read_facts
from dflash_ddp.panel import make_setup
from dflash_ddp.runlog import RunLog
from dflash_ddp.schedule import Kind
from dflash_ddp.startup import Run
from dflash_ddp.target.tables import random_tables, read_tables
from dflash_ddp.world import World

logger = logging.getLogger(__name__)


class Features(Protocol):
    """Where a drafter's feature batches come from: the channel, or the rank itself."""

    wait_s: float
    num_full: int

    def receive(self) -> Received | None:
        """The next feature batch of this drafter; None after its last."""

    def release(self, received: Received) -> None:
        """Give its slot back."""

    def close(self) -> None:
        """Wait until nothing more can come."""


class Summary(NamedTuple):
    """What a finished run says in one line."""

    steps: int
    loss: float | None
    accept_length: float | None
    untrained_accept_length: float | None
    tokens_per_s: float
    export: str


def target_tables(run: Run, device: torch.device) -> Tables:
    """The target's tables in the drafter's compute dtype."""
    target, dtype = run.config.target, run.drafter_dtype
    if target.random_weights:
        return Tables(*random_tables(run.spec, dtype, device, run.config.seed))
    return Tables(*read_tables(target.path, target.revision, run.spec, dtype, device))


class DrafterWorker:
    """The state of one drafter rank: model, optimizer, counters."""

    def __init__(self, run: Run, world: World, control: Control, features: Features) -> None:
        """Build the drafter, load the target's tables and, on resume, the checkpoint."""
        self.run, self.world, self.control, self.features = run, world, control, features
        self.ordinal = world.topology.drafter_ranks.index(world.rank)
        self.num_drafters = run.config.split.drafters
        device = world.device
        self.model = Drafter(run.shape)
        self.model.reset_parameters(run.config.seed)
        self.model.to(device)
        self.optimizer = make_optimizer(self.model, run.config.optim)
        config = run.config
        self.tables = target_tables(run, device)
        if run.found.checkpoint is not None:
            folder = Path(run.found.checkpoint)
            load_tensors(folder, self.model, self.optimizer, read_state(folder).step)
        self.loss = self._loss_settings()
        self.trained = self._data_parallel()
        self.sequence = 0
        self.log: RunLog | None = None
        if self.ordinal == 0:
            cuda = device.type == "cuda"
            gpu = find_gpu(torch.cuda.get_device_name(device)) if cuda else None
            setup = make_setup(read_facts(config), gpu)
            self.log = RunLog(run.folder, config, setup, first_step=run.found.first_step)
            control.before_exit(self._close_log_after_error)
        self.steplog = StepLog(
            world,
            control,
            self.log,
            block_size=config.drafter.block_size,
            tokens=run.found.tokens,
        )
        self.accept_lengths: dict[int, float | None] = {}

    def _close_log_after_error(self) -> None:
        if self.log is not None:
            self.log.close(exit_code=1)

    def _loss_settings(self) -> LossSettings:
        config = self.run.config
        recompute = resolve_recompute(config.loss.recompute)
        cuda = self.world.device.type == "cuda"
        if cuda:
            require_compiler()  # attention is compiled there even if nothing else is
        if not (cuda if config.drafter.compile is None else config.drafter.compile):
            return LossSettings(config.loss.chunk_rows, recompute)
        warm = use_cache()
        logger.info("compiled code: %s", "found in the cache" if warm else "cache is empty")
        return compile_step(self.model, chunk_rows=config.loss.chunk_rows, recompute=recompute)

    def _data_parallel(self) -> nn.Module:
        if self.num_drafters == 1:
            return self.model
        # Who meets: all drafter ranks, here to compare shapes and take rank 0's weights, then in
        # every backward pass whose gradients are reduced. A rank without labels still comes.
        return DistributedDataParallel(
            self.model,
            process_group=self.world.drafter_group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    def train(self) -> Summary:
        """Run all steps; the summary is the same on every drafter rank but for its figures."""
        run, config = self.run, self.run.config
        assert config.steps is not None
        start, steplog = time.monotonic(), self.steplog
        if run.found.first_step == config.steps:
            logger.info("all %d steps are complete already; nothing is trained", config.steps)
        for step in range(run.found.first_step, config.steps + 1):
            if step in run.schedule.eval_steps:
                steplog.write()
                self._evaluate(step)
            if step > run.found.first_step and self._saves_at(step):
                steplog.write()
                self._save(step)
            if step == config.steps:
                break
            self.control.phase(f"train step {step}")
            lr = self._step(step)
            if self._logs_at(step + 1):
                steplog.measure(
                    step + 1, lr=lr, wait_s=self.features.wait_s, slots_full=self.features.num_full
                )
            else:
                steplog.write()
        self.features.close()
        elapsed = time.monotonic() - start
        return Summary(
            steps=config.steps,
            loss=steplog.last_loss,
            accept_length=self.accept_lengths.get(config.steps),
            untrained_accept_length=self.accept_lengths.get(0),
            tokens_per_s=(steplog.tokens - run.found.tokens) / elapsed,
            export=str(run.folder / "export"),
        )

    def _saves_at(self, step: int) -> bool:
        every = self.run.config.checkpoint.every
        return step == self.run.config.steps or bool(every and step % every == 0)

    def _logs_at(self, step: int) -> bool:
        """Also before an evaluation and a checkpoint, so that their token counts are exact."""
        due = step % self.run.config.logging.every == 0 or step in self.run.schedule.eval_steps
        return due or self._saves_at(step)

    def _next_item(self) -> int:
        item = self.run.schedule.item_of(self.ordinal, self.sequence)
        self.sequence += 1
        return item

    def _receive(self, item: int, batch: PackedBatch) -> Received:
        """The features of `batch`, proven to belong to it.

        Raises:
            ValueError: another item or other tokens than this rank's schedule says.
        """
        received = self.features.receive()
        if received is None:
            raise ValueError(f"the stream ended before item {item}")
        header = received.header
        if received.item != item or header.digest != batch.digest():
            raise ValueError(
                f"features of item {received.item} (digest {header.digest:08x}) came where item "
                f"{item} (digest {batch.digest():08x}) was due: do all nodes hold the same data?"
            )
        return received

    def _features_of(self, received: Received) -> Tensor:
        return self.run.slot_features(received.slot).to(self.run.drafter_dtype)

    def _host_inputs(self, batch: PackedBatch) -> HostInputs:
        config = self.run.config
        anchors = sample_anchors(batch, config.drafter.num_anchors, seed=config.seed)
        blocks = make_blocks(
            batch,
            anchors,
            num_anchors=config.drafter.num_anchors,
            block_size=config.drafter.block_size,
            gamma=config.loss.position_gamma,
        )
        return host_inputs(
            batch,
            blocks,
            self.run.shape,
            context_length=config.tokens_per_batch,
            chunk_rows=config.loss.chunk_rows,
            flex=self.world.device.type == "cuda",
        )

    def _step(self, step: int) -> float:
        """One optimizer step; the learning rate used."""
        config = self.run.config
        assert config.steps is not None
        items = [self._next_item() for _ in range(config.microbatches)]
        batches = [self.run.load(self.run.schedule.item(item)) for item in items]
        hosts = [self._host_inputs(batch) for batch in batches]
        scale = self._scale(sum(host.weight_sum for host in hosts))
        for i, (item, batch, host) in enumerate(zip(items, batches, hosts, strict=True)):
            received = self._receive(item, batch)
            inputs = to_device(host, self.run.shape, self.world.device)
            with self._reduce_at(last=i == len(items) - 1):
                result = forward_backward(
                    self.trained,
                    self.tables,
                    self._features_of(received),
                    inputs,
                    scale=scale,
                    loss=self.loss,
                )
            self.features.release(received)
            self.steplog.add(
                microbatch_sums(
                    result, inputs, weight_sum=host.weight_sum, num_tokens=host.num_tokens
                )
            )
        lr = config.optim.lr * lr_multiplier(
            step,
            steps=config.steps,
            warmup_share=config.optim.warmup_share,
            min_share=config.optim.min_lr_share,
        )
        grad_norm = clip_gradients(self.model.parameters(), config.optim.max_grad_norm)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.num_drafters == 1)
        self.steplog.end_step(grad_norm)
        return lr

    def _scale(self, weight_sum: float) -> Tensor:
        """Ranks / sum of weights over all ranks and microbatches of the step; 0 without labels.

        DDP averages over ranks, so this makes the gradient that of the global weighted mean.
        """
        total = torch.tensor(weight_sum, dtype=torch.float64)
        if self.world.device.type == "cuda":
            total = total.pin_memory().to(self.world.device, non_blocking=True)
        # Who meets: all drafter ranks, once a step, before its first backward pass.
        dist.all_reduce(total, group=self.world.drafter_group)
        return torch.where(total > 0, self.num_drafters / total, 0.0).float()

    def _reduce_at(self, *, last: bool) -> AbstractContextManager:
        """Gradients are reduced in the last microbatch of a step only."""
        if last or not isinstance(self.trained, DistributedDataParallel):
            return nullcontext()
        return self.trained.no_sync()

    def _evaluate(self, step: int) -> None:
        """Accept length on held-out text, through the same channel as training."""
        self.control.phase(f"evaluate at step {step}")
        config, schedule = self.run.config, self.run.schedule
        tally = AcceptTally.empty(config.drafter.block_size).to_array()
        for _ in range(self.ordinal, schedule.num_heldout, self.num_drafters):
            item = self._next_item()
            stream_item = schedule.item(item)
            assert stream_item.kind is Kind.HELDOUT
            batch = self.run.load(stream_item)
            received = self._receive(item, batch)
            tally += tally_batch(
                self.model,
                self.tables,
                self._features_of(received),
                batch,
                num_anchors=config.drafter.num_anchors,
                loss=self.loss,
            ).to_array()
            self.features.release(received)
        self.steplog.not_training()
        total = torch.from_numpy(tally).to(self.world.device)
        # Who meets: all drafter ranks, after their share of the held-out batches.
        dist.all_reduce(total, group=self.world.drafter_group)
        result = AcceptTally.from_array(total.cpu().numpy())
        self.accept_lengths[step] = result.accept_length
        self.steplog.write_heldout(step, result)

    def _native_config(self) -> dict:
        run = self.run
        return native_config(run.shape, run.spec, run.found.capture_layers, run.drafter_dtype)

    def _save(self, step: int) -> None:
        """Checkpoint; at the last step also the final drafter."""
        if self.ordinal != 0:
            return
        self.control.phase(f"save step {step}")
        run, start = self.run, time.monotonic()
        checkpoints = run.folder / "checkpoints"
        folder = save_checkpoint(
            checkpoints,
            self.model,
            self.optimizer,
            TrainerState(step, self.steplog.tokens, run.fingerprint()),
            native_config=self._native_config(),
            dtype=run.drafter_dtype,
            keep_last=run.config.checkpoint.keep_last,
        )
        if step == run.config.steps:
            export = run.folder / "export"
            export.mkdir(exist_ok=True)
            weights = self.model.state_dict()
            save_native(export, weights, self._native_config(), run.drafter_dtype)
        logger.info("saved %s, %.1f s", folder, time.monotonic() - start)
        self.steplog.not_training()
