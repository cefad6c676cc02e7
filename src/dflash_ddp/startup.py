"""From settings to everything that both roles of a run share: target, data, schedule, place to resume.

Rank 0 checks what can be checked without a GPU (`dflash_ddp.preflight`) and tells the others; the first rank of each
node prepares the data while the others wait. Then every rank builds the same `Run`.
"""

import json
import logging
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_ddp.batch import PackedBatch
from dflash_ddp.checkpoint import differences, read_state
from dflash_ddp.config import Config, ConfigError
from dflash_ddp.control import Control
from dflash_ddp.data.packing import Packing, packed_batch
from dflash_ddp.data.store import DocumentStore
from dflash_ddp.drafter.blocks import decay_gamma
from dflash_ddp.drafter.model import DrafterShape
from dflash_ddp.folder import OwnFolder, claim_folder, claimed_by
from dflash_ddp.jobstore import JobStore
from dflash_ddp.native import drafter_shape
from dflash_ddp.preflight import (
    Preflight,
    device_type,
    preflight,
    torch_dtype,
    use_cache_without_hub,
)
from dflash_ddp.schedule import Kind, Schedule, StreamItem, evaluation_steps
from dflash_ddp.target.tables import TargetSpec, read_spec
from dflash_ddp.texts import check_same_documents, data_report, prepare_texts
from dflash_ddp.world import Launch

logger = logging.getLogger(__name__)

CLAIMED = "claimed"
"""Key of the store: this launch has claimed the run's folder."""
# What a continuation must have as it was, beside optimizer, drafter and text.
_SAME_SETTINGS = (
    "seed steps tokens_per_batch batches_per_step split.drafters drafter.num_anchors "
    "drafter.init_from loss.dpace_alpha target.random_weights target.path target.revision data.path "
    "data.split data.revision data.max_length data.enable_thinking eval.max_documents"
).split()


@dataclass(frozen=True)
class Run:
    """One run as every rank sees it.

    Attributes:
        config: the settings, with `steps` resolved.
        device: `cuda` or `cpu`.
        spec: the target's sizes.
        found: rank 0's preflight.
        text: tokenised training documents.
        heldout: tokenised held-out documents, or None.
    """

    config: Config
    device: str
    spec: TargetSpec
    found: Preflight
    text: DocumentStore
    heldout: DocumentStore | None

    @property
    def folder(self) -> Path:
        """Everything the run writes."""
        return Path(self.config.output_dir)

    @cached_property
    def own_folder(self) -> OwnFolder:
        """The same, as rank 0 has claimed it."""
        return OwnFolder(self.folder)

    @cached_property
    def shape(self) -> DrafterShape:
        """The drafter's."""
        return drafter_shape(
            self.config.drafter,
            self.spec,
            num_capture_layers=len(self.found.capture_layers),
            mask_token_id=self.found.mask_token_id,
        )

    @property
    def feature_dtype(self) -> torch.dtype:
        """Dtype of context features."""
        return torch_dtype(self.config.target.dtype, self.device)

    @property
    def drafter_dtype(self) -> torch.dtype:
        """The drafter's compute dtype."""
        return torch_dtype(self.config.drafter.dtype, self.device)

    @property
    def feature_width(self) -> int:
        """C = K * H."""
        return len(self.found.capture_layers) * self.spec.hidden_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of a full slot: S * C features."""
        return self.feature_bytes(self.config.tokens_per_batch)

    def feature_bytes(self, num_tokens: int) -> int:
        """Bytes of so many tokens' features."""
        return num_tokens * self.feature_width * self.feature_dtype.itemsize

    def slot_features(self, slot: Tensor) -> Tensor:
        """A slot's bytes as context features [S, C]: a view."""
        return slot.view(self.feature_dtype).view(self.config.tokens_per_batch, self.feature_width)

    @cached_property
    def packing(self) -> Packing:
        """Training batches."""
        config = self.config
        return Packing(
            self.text.lengths,
            tokens_per_batch=config.tokens_per_batch,
            batches_per_step=config.batches_per_step,
            seed=config.seed,
        )

    @cached_property
    def heldout_packing(self) -> Packing | None:
        """Held-out batches: the first documents, in order."""
        if self.heldout is None:
            return None
        lengths = self.heldout.lengths[: self.config.eval.max_documents]
        budget = self.config.tokens_per_batch
        return Packing(lengths, tokens_per_batch=budget, batches_per_step=1, seed=0, shuffle=False)

    @cached_property
    def schedule(self) -> Schedule:
        """The stream."""
        config, heldout = self.config, self.heldout_packing
        assert config.steps is not None
        return Schedule(
            steps=config.steps,
            batches_per_step=config.batches_per_step,
            num_drafters=config.split.drafters,
            num_heldout=heldout.num_batches_per_epoch(0) if heldout else 0,
            eval_steps=evaluation_steps(
                config.steps, every=config.eval.every, at_start=config.eval.at_start
            ),
            first_step=self.found.first_step,
        )

    def load(self, item: StreamItem) -> PackedBatch:
        """The packed batch of a stream item."""
        if item.kind is Kind.TRAIN:
            return packed_batch(self.text, self.packing.documents(item.batch), item.batch)
        assert self.heldout is not None
        assert self.heldout_packing is not None
        documents = self.heldout_packing.documents(item.batch)
        return packed_batch(self.heldout, documents, item.batch)

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its continuation."""
        heldout = self.heldout
        return self.settings_fingerprint() | {
            "data content": self.text.fingerprint,
            "data tokens": self.text.content,
            "data.heldout content": None if heldout is None else heldout.fingerprint,
            "data.heldout tokens": None if heldout is None else heldout.content,
        }

    def settings_fingerprint(self) -> dict[str, Any]:
        """The part of it that no text has to be read for."""
        config = self.config
        shape = {f"drafter.{key}": value for key, value in asdict(self.shape).items()}
        optim = {f"optim.{key}": value for key, value in asdict(config.optim).items()}
        del optim["optim.max_bad_steps"]  # ends a run, changes none
        return (
            shape
            | optim
            | {key: attrgetter(key)(config) for key in _SAME_SETTINGS}
            | {
                "drafter.layer_types": list(self.shape.layer_types),
                "drafter.dtype": str(self.drafter_dtype),
                "loss.position_weight": config.loss.position_weight.value,
                "loss.position_gamma": decay_gamma(config.loss, config.drafter.block_size),
                "target.dtype": str(self.feature_dtype),
                "target.capture_layers": self.found.capture_layers,
                "target chat template": self.found.chat_template,
            }
        )


def goes_on(config: Config, launch: Launch, store: JobStore) -> bool:
    """Whether the launcher has started these ranks anew: they go on, never from the beginning.

    torchrun does not count restarts that another node brought about. The key in the store is the
    launch's own, whereas several launches may bear one id.
    """
    is_anew = launch.restart_count > 0 or store.launch.check([CLAIMED])
    return is_anew and claimed_by(config) == launch.run_id


def prepare_run(config: Config, launch: Launch, store: JobStore, control: Control) -> Run:
    """Check, prepare the data, and assemble; all ranks return the same.

    Raises:
        ConfigError: on the rank that found the problem; the others are told through `control`.
    """
    control.phase("preflight")
    use_cache_without_hub()
    if launch.rank == 0:
        if goes_on(config, launch, store):
            config.resume = "auto"
        control.publish("preflight", json.dumps(asdict(preflight(config))))
    found = Preflight(**json.loads(control.wait_for("preflight", "rank 0 to check the settings")))
    control.phase("data")
    key = f"data/{launch.rank // launch.local_world_size}"
    if launch.local_rank == 0:
        control.publish(key, json.dumps(prepare_texts(config, speaks=launch.rank == 0)))
    here = json.loads(control.wait_for(key, "the first rank of this node to prepare the data"))
    first = json.loads(control.wait_for("data/0", "rank 0 to prepare the data"))
    check_same_documents(here, first)
    spec = read_spec(config.target.path, config.target.revision, config.target.trust_remote_code)
    text = DocumentStore(here["text"]["path"])
    heldout = DocumentStore(here["heldout"]["path"]) if here["heldout"] else None
    device = device_type(config.device)
    run = Run(config, device, spec, found, text, heldout)
    _resolve_steps(run)
    if launch.rank == 0:
        _check_run(run)
        report = data_report(text, heldout, max_documents=config.eval.max_documents)
        claim_folder(config, report, launch.run_id)
        store.launch.set(CLAIMED, "")
        control.publish("folder")
    control.wait_for("folder", "rank 0 to claim the run's folder")
    control.own_folder = run.own_folder
    return run


def check_continues(checkpoint: Path, now: dict[str, Any], config: Config) -> None:
    """ConfigError that names each change if a run of this fingerprint does not go on from there."""
    saved = read_state(checkpoint).fingerprint
    if config.resume_other_drafters:
        now = now | {"split.drafters": saved["split.drafters"]}
    if changed := differences(saved, now):
        hint = ""
        if saved["split.drafters"] != now["split.drafters"]:
            same = f"batches_per_step={saved['batches_per_step']}"
            hint = f" (resume_other_drafters=true {same} goes on with other ranks)"
        raise ConfigError(
            f"{checkpoint} was made by another run; take another name, or "
            f"resume=none to start anew{hint}:\n  " + "\n  ".join(changed)
        )


def _resolve_steps(run: Run) -> None:
    """`epochs` to steps; the last step is filled from the next pass, so no batch is dropped."""
    if run.config.steps is None:
        batches = sum(run.packing.num_batches_per_epoch(e) for e in range(run.config.epochs))
        run.config.steps = -(-batches // run.config.batches_per_step)


def _check_run(run: Run) -> None:
    for store in filter(None, (run.text, run.heldout)):
        try:
            store.check_ids(run.spec.table_rows, run.found.mask_token_id)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    steps = run.config.steps
    assert steps is not None
    if run.found.checkpoint is not None:
        check_continues(Path(run.found.checkpoint), run.fingerprint(), run.config)
    batches = run.packing.num_batches_per_epoch(0)
    logger.info(
        "%d documents, %s tokens in %d packed batches; %d steps of %d batches, %.2f epochs",
        run.text.num_documents,
        f"{run.text.num_tokens:,}",
        batches,
        steps,
        run.config.batches_per_step,
        steps * run.config.batches_per_step / batches,
    )
