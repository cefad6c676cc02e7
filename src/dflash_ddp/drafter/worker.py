"""A drafter rank's program: receive features, forward and backward, optimizer step; evaluate, log, save.

The loop asks the GPU nothing in a steady step: blocks and weights are known on the host, sums of metrics stay on the
device, and a row of the log is read one step after it was measured.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dflash_ddp.accept import AcceptTally
from dflash_ddp.checkpoint import TrainerState, load_tensors, read_state, state_sum
from dflash_ddp.compiling import compile_now, require_compiler
from dflash_ddp.config import ConfigError, Export
from dflash_ddp.control import Control
from dflash_ddp.costs import find_gpu
from dflash_ddp.drafter.badsteps import BadSteps
from dflash_ddp.drafter.heldout import walk_batch
from dflash_ddp.drafter.inputs import to_device
from dflash_ddp.drafter.intake import Features, Intake
from dflash_ddp.drafter.metrics import microbatch_sums
from dflash_ddp.drafter.model import Drafter
from dflash_ddp.drafter.optim import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_lr,
    step_if_finite,
)
from dflash_ddp.drafter.saving import Saver, best_step
from dflash_ddp.drafter.step import (
    Tables,
    compile_step,
    forward,
    forward_backward,
    loss_settings,
    without_gradient,
)
from dflash_ddp.drafter.steplog import StepLog
from dflash_ddp.facts import read_facts
from dflash_ddp.native import load_weights
from dflash_ddp.panel import make_setup
from dflash_ddp.profiling import StepProfiler
from dflash_ddp.runlog import RunLog, Summary
from dflash_ddp.schedule import Kind, StreamItem
from dflash_ddp.startup import Run
from dflash_ddp.stopping import Stopping
from dflash_ddp.target.tables import random_tables, read_tables
from dflash_ddp.world import World

logger = logging.getLogger(__name__)


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
        self.run, self.world, self.control = run, world, control
        self.ordinal = world.topology.drafter_ranks.index(world.rank)
        self.intake = Intake(run, features, self.ordinal)
        self.num_drafters = run.config.split.drafters
        device = world.device
        control.phase("build drafter")
        self.model = Drafter.empty(run.shape)
        self.model.reset_parameters(run.config.seed)
        if run.config.drafter.init_from is not None and run.found.checkpoint is None:
            load_weights(self.model, Path(run.config.drafter.init_from))
        self.model.to(device)
        self.optimizer = make_optimizer(self.model, run.config.optim)
        config = run.config
        self.tables = target_tables(run, device)
        num_slots = config.drafter.num_anchors * (config.drafter.block_size - 1)
        self.loss = loss_settings(config.loss, num_slots)
        cuda = device.type == "cuda"
        if cuda:
            require_compiler()  # attention is compiled there even if nothing else is
        if config.drafter.compile or (config.drafter.compile is None and cuda):
            self._compile()
        self.trained = self._data_parallel()
        state: TrainerState | None = None
        if run.found.checkpoint is not None:
            state = read_state(Path(run.found.checkpoint))
            load_tensors(Path(run.found.checkpoint), self.model, self.optimizer)
            self._check_same_state(run.found.checkpoint)
        self.log: RunLog | None = None
        if self.ordinal == 0:
            gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
            setup = make_setup(read_facts(config), gpu, cpu=device.type == "cpu")
            self.log = RunLog(run.own_folder, config, setup, first_step=run.found.first_step)
            control.before_exit(partial(self.log.close, exit_code=1))
        self.saver: Saver | None = None
        if self.ordinal == 0:
            self.saver = Saver(run, control, self.model, self.optimizer)
        self.accept_lengths = dict(state.accept_lengths) if state else {}
        num_bad = state.bad_steps if state else 0
        self.bad_steps = BadSteps(run, world.rank, speaks=self.ordinal == 0, count=num_bad)
        self.steplog = StepLog(
            world,
            control,
            self.log,
            block_size=config.drafter.block_size,
            tokens=run.found.tokens,
            wait_s=lambda: features.wait_s,
            more=self._other_values,
        )  # last: time runs from here
        if state is not None:
            self.steplog.restore(state.sums, self.ordinal)

    def _check_same_state(self, checkpoint: str) -> None:
        """After a checkpoint is loaded: nodes that do not share their outputs may have other files.

        Raises:
            ConfigError: on the first drafter rank; names the others.
        """
        own, ranks = state_sum(self.model, self.optimizer), self.world.topology.drafter_ranks
        sums = [torch.empty_like(own) for _ in ranks]
        # Who meets: all drafter ranks, once; one that could not load ends the job.
        dist.all_gather(sums, own, group=self.world.drafter_group)
        first, *others = torch.cat(sums).tolist()
        wrong = [rank for rank, other in zip(ranks[1:], others, strict=True) if other != first]
        if wrong and self.ordinal == 0:
            raise ConfigError(
                f"{checkpoint} holds other weights or moments on drafter ranks {wrong} than on rank "
                f"{ranks[0]}: their nodes have other files there; share output_dir, or copy it"
            )

    def _other_values(self, step: int) -> dict[str, float]:
        """Values of a row that others than the step log know."""
        saved = {} if self.saver is None else self.saver.metrics()
        self.bad_steps.look(wait=False)  # the row has arrived, so the flags of its steps have
        return {"optim/bad_steps": self.bad_steps.count(step)} | saved

    def _compile(self) -> None:
        """Compile what a step runs, and run it once, before the first batch comes."""
        config = self.run.config
        graphs = f"{self.run.shape} {self.run.drafter_dtype} {config.tokens_per_batch} "
        graphs += f"{config.drafter.num_anchors} {len(self.tables.head_VH)} {self.loss[:2]}"
        self.loss = self.loss._replace(functions=compile_step(self.model))
        self.control.phase("compile drafter")
        compile_now("the drafter", graphs, self._step_once)

    def _step_once(self) -> None:
        """Forward with and without gradients, and backward, as training and evaluation run them."""
        run, device = self.run, self.world.device
        batch = run.load(StreamItem(0, Kind.TRAIN, 0, 0, 0))
        host = self.intake.host_inputs(batch, self.loss.chunk_rows)
        inputs = to_device(host, run.shape, device)
        size = (run.config.tokens_per_batch, run.feature_width)
        features_SC = torch.zeros(size, dtype=run.drafter_dtype, device=device)
        scale = torch.ones((), device=device)
        self.model.zero_grad(set_to_none=True)  # of an earlier try
        forward_backward(self.model, self.tables, features_SC, inputs, scale=scale, loss=self.loss)
        self.model.zero_grad(set_to_none=True)
        if run.heldout is not None:
            with torch.no_grad():
                loss = without_gradient(self.loss)
                forward(self.model, self.tables, features_SC, inputs, loss=loss)

    def _data_parallel(self) -> nn.Module:
        if self.num_drafters == 1:
            return self.model
        # Who meets: all drafter ranks, here to compare shapes and take rank 0's weights, then in
        # every backward pass whose gradients are reduced. A rank without labels still comes.
        return DistributedDataParallel(
            self.model,
            process_group=self.world.drafter_group,
            gradient_as_bucket_view=True,
        )

    def train(self) -> Summary:
        """Run all steps, or as many as are wanted; the summary is that of the first drafter rank."""
        run, config, control = self.run, self.run.config, self.control
        assert config.steps is not None
        start, steplog = time.monotonic(), self.steplog
        name = f"{control.topology.role(control.rank)}_rank{control.rank}"
        profiler = StepProfiler(
            *(config, run.found.first_step, self.world.device, name), wanted=self.ordinal == 0
        )
        stopping = Stopping(control, self.world.drafter_group, config.max_hours)
        if run.found.first_step == config.steps:
            logger.info("all %d steps are complete already; nothing is trained", config.steps)
        for step in range(run.found.first_step, config.steps + 1):
            if step in run.schedule.eval_steps:
                steplog.write()
                with steplog.pause():
                    self._evaluate(step)
            wish = stopping.agree()
            ends = wish.stop or step == config.steps
            if wish.stop:
                control.request_stop(run.schedule.first_item(step))
            every = config.checkpoint.every
            due = ends or wish.save or step == self._best or bool(every and step % every == 0)
            if due and step > run.found.first_step:
                steplog.write()
                with steplog.pause():
                    self._save(step, last=ends)
            if ends:
                break
            control.phase(f"train step {step}")
            profiler.at(step)
            lr = self._step(step)
            if self._logs_at(step + 1):
                steplog.measure(step + 1, lr=lr, slots_full=self.intake.features.num_full)
            else:
                steplog.write()
        profiler.close()
        self.intake.features.close()
        elapsed = time.monotonic() - start
        stopped_by = stopping.reason if step < config.steps else None
        if stopped_by is not None:
            how = " with resume=auto" if config.resume == "none" else ""
            logger.warning(
                "%s: stopped after %d of %d steps; the same command%s goes on",
                *(stopped_by, step, config.steps, how),
            )
        exported = self.saver.finish(step, self._best) if self.saver is not None else None
        return Summary(
            steps=step,
            loss=steplog.last_loss,
            accept_length=self.accept_lengths.get(step if exported is None else exported),
            untrained_accept_length=self.accept_lengths.get(0),
            tokens_per_s=(steplog.tokens - run.found.tokens) / elapsed,
            best_step=exported,
            export=None if exported is None else str(run.folder / "export"),
            stopped_by=stopped_by,
        )

    def _logs_at(self, step: int) -> bool:
        """Also before an evaluation, so that its token count is exact, and at the end."""
        config = self.run.config
        due = step % config.logging.every == 0 or step == config.steps
        return due or step in self.run.schedule.eval_steps

    def _step(self, step: int) -> float:
        """One optimizer step; the learning rate used."""
        config = self.run.config
        assert config.steps is not None
        taken = [self.intake.next(Kind.TRAIN) for _ in range(config.microbatches)]
        hosts = [self.intake.host_inputs(batch, self.loss.chunk_rows) for _, batch in taken]
        scale = self._scale(sum(host.weight_sum for host in hosts))
        losses = []
        for i, ((item, batch), host) in enumerate(zip(taken, hosts, strict=True)):
            received = self.intake.receive(item, batch)
            inputs = to_device(host, self.run.shape, self.world.device)
            with self._reduce_at(last=i == len(taken) - 1):
                result = forward_backward(
                    self.trained,
                    self.tables,
                    self.intake.tensor(received),
                    inputs,
                    scale=scale,
                    loss=self.loss,
                )
            self.intake.features.release(received)
            losses.append(result.loss_sum)
            self.steplog.add(
                microbatch_sums(
                    result, inputs, weight_sum=host.weight_sum, num_tokens=host.num_tokens
                )
            )
        lr = learning_rate(step, config.steps, config.optim)
        grad_norm = clip_gradients(self.model.parameters(), config.optim.max_grad_norm)
        set_lr(self.optimizer, lr)
        step_if_finite(self.optimizer, grad_norm)
        self.optimizer.zero_grad(set_to_none=self.num_drafters == 1)
        self.steplog.end_step(grad_norm)
        self.bad_steps.add(step + 1, [batch for _, batch in taken], losses, grad_norm)
        return lr

    def _scale(self, weight_sum: float) -> Tensor:
        """Ranks / sum of weights over all ranks and microbatches of the step; 0 without labels.

        DDP averages over ranks, so this makes the gradient that of the global weighted mean.
        """
        total = torch.full((), weight_sum, dtype=torch.float64, device=self.world.device)
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
        tally = AcceptTally.empty(config.drafter.block_size)
        for _ in range(self.ordinal, schedule.num_heldout, self.num_drafters):
            item, batch = self.intake.next(Kind.HELDOUT)
            received = self.intake.receive(item, batch)
            for calls in walk_batch(
                self.model,
                self.tables,
                self.intake.tensor(received),
                batch,
                num_anchors=config.drafter.num_anchors,
                loss=self.loss,
                flex=self.world.device.type == "cuda",
            ):
                tally.add(calls)
            self.intake.features.release(received)
        total = torch.from_numpy(tally.to_array())
        # Who meets: all drafter ranks, after their share of the held-out batches.
        dist.all_reduce(total, group=self.world.drafter_group)
        result = AcceptTally.from_array(total.numpy())
        self.accept_lengths[step] = result.accept_length
        self.steplog.write_heldout(step, result, generated=config.data.heldout_generated)
        if step == config.steps:
            logger.info("%s", result.chart())

    def _save(self, step: int, *, last: bool) -> None:
        """Checkpoint: all drafter ranks bring their sums, the first one saves."""
        self.bad_steps.look(wait=True)
        sums = self.steplog.gather()
        if self.saver is None:
            return
        self.control.phase(f"save step {step}")
        state = TrainerState(
            step=step,
            tokens=self.steplog.tokens,
            sums=sums,
            bad_steps=self.bad_steps.count(step),
            accept_lengths=list(self.accept_lengths.items()),
            fingerprint=self.run.fingerprint(),
        )
        self.saver.save(state, best=self._best, last=last)

    @property
    def _best(self) -> int | None:
        """The step that export/ shall be of; None: the last."""
        if self.run.config.checkpoint.export is Export.last:
            return None
        return best_step(self.accept_lengths)
