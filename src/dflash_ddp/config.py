"""Every setting of a run: its name, type, unit, bound and meaning.

Hydra composes `conf/` and the command line into a tree, and `settings.parse` turns that into the dataclasses below.
What a run finds out itself is put in once, at start: `steps` from `epochs` and, after a restart by the launcher,
`resume` (startup.py). This file imports no torch, so that mistakes show before anything slow is loaded.
"""

from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

TILE = 128  # flex attention works in tiles of 128 tokens


class ConfigError(ValueError):
    """A setting that cannot work; the text names key, value and rule, one problem a line."""


class Device(Enum):
    """Where ranks compute. (Members are lower case because OmegaConf matches them by name.)"""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Dtype(Enum):
    """Compute dtype; auto is bfloat16 on GPUs and float32 on CPUs."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Recompute(Enum):
    """How the loss gets its gradient."""

    in_forward = "in_forward"
    reentrant = "reentrant"
    non_reentrant = "non_reentrant"
    none = "none"


class PositionWeight(Enum):
    """What a slot's loss counts."""

    decay = "decay"
    uniform = "uniform"
    dpace = "dpace"


class Wandb(Enum):
    """Where wandb writes."""

    online = "online"
    offline = "offline"
    disabled = "disabled"


class Export(Enum):
    """Which drafter a run ends with."""

    best = "best"
    last = "last"


OnError = Enum("OnError", {"continue": "continue", "stop": "stop"})
OnError.__doc__ = """What follows when a checkpoint cannot be written."""


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    """The frozen LLM."""

    path: str = MISSING
    """Folder in transformers format, or a name on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Dtype = Dtype.auto
    """Dtype of its weights and of the context features."""
    capture_layers: list[int] | None = None
    """Layers read, 0-based, ascending; null: evenly spaced by z-lab's formula, one for each drafter layer."""
    attention: str = "sdpa"
    """Attention implementation of transformers."""
    compile: bool | None = None
    """Compile its layers; null: on GPUs."""
    row_tokens: int = 16_384
    """Tokens of one forward call, padding included; > 0. More is faster and takes more memory."""
    trust_remote_code: bool = False
    """Run code that comes with the weights."""
    random_weights: bool = False
    """Weights from the seed, made on the device, in place of files: to measure speed. Results are noise."""


@dataclass(kw_only=True, slots=True)
class DrafterConfig:
    """The network that is trained. Sizes that are null follow the target."""

    num_layers: int = 5
    """Layers; >= 1."""
    block_size: int = 16
    """Tokens of a block, the anchor included; 2..128."""
    num_anchors: int = 2048
    """Blocks of a packed batch, spread over its documents; >= 1."""
    intermediate_size: int | None = None
    """Width of the SwiGLU."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key/value heads; divides the query heads."""
    head_dim: int | None = None
    """Width of a head; even."""
    sliding_layers: int = 0
    """The first so many layers use sliding-window attention, the rest full; 0..num_layers."""
    sliding_window: int = 2048
    """Window of sliding layers, tokens, the query counted; >= 1."""
    is_causal: bool | None = None
    """Inside a block: true or false for all layers; null: causal on sliding layers only (z-lab)."""
    init_from: str | None = None
    """Native folder whose weights a new run starts from; shape and semantics must be this drafter's."""
    mask_token_id: int | None = None
    """Row of the target's table that fills the block; null: chosen by the target's family."""
    dtype: Dtype = Dtype.auto
    """Compute dtype; parameters and optimizer state are fp32."""
    compile: bool | None = None
    """Compile the whole drafter; null: on GPUs. Attention is always compiled on GPUs."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Chat text."""

    path: str = MISSING
    """JSONL or parquet file, folder or glob, or a data set on the hub, with `messages` or `conversations`."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set, `path` and `heldout` alike."""
    heldout: str | None = None
    """Like `path`: rows to measure accept length on; never trained on."""
    heldout_split: str = "test"
    """Split of a held-out hub data set."""
    heldout_generated: bool = False
    """The target itself wrote the held-out answers, greedily. Without, their walk is logged as
    `heldout/walk_on_text`: no accept length. `python -m dflash_ddp.evaluate` checks it."""
    max_length: int = 4096
    """Tokens of a document; longer ones are cut; <= tokens_per_batch."""
    enable_thinking: bool | None = None
    """Passed to the chat template; null: the template's own default. Must match serving."""
    max_bad_share: float = 0.2
    """More unusable rows than this share is an error; 0..1."""
    num_workers: int | None = None
    """Processes that tokenise; 0: in this process; null: one for each core, 16 at most."""
    cache_dir: str = "outputs/cache"
    """Where tokenised text is kept, by content."""


@dataclass(kw_only=True, slots=True)
class SplitConfig:
    """Which ranks do what."""

    targets: int = 5
    """Ranks that run the target; >= 1."""
    drafters: int = 3
    """Ranks that train the drafter; >= 1."""
    colocated: bool = False
    """Every rank does both in turn, without transport; targets must equal drafters."""
    depth: int = 2
    """Feature batches a drafter rank holds ahead of the one in use; >= 0."""
    lane_ctas: int = 4
    """GPU thread blocks that one lane's transfers may use; >= 1."""
    share_gpu: bool = False
    """Several ranks on a GPU, over NCCL sockets: for checking behaviour on few GPUs, not for speed."""


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW on fp32 master weights."""

    lr: float = 6e-4
    """Highest learning rate; > 0."""
    warmup_share: float = 0.04
    """Share of the steps in which it rises; 0..1."""
    min_lr_share: float = 0.0
    """The cosine ends at this share of `lr`; 0..1."""
    beta1: float = 0.9
    """Decay of the mean gradient; 0 <= beta1 < 1."""
    beta2: float = 0.95
    """Decay of the mean squared gradient; 0 <= beta2 < 1."""
    eps: float = 1e-8
    """AdamW's epsilon; > 0."""
    weight_decay: float = 0.0
    """Of matrices; >= 0."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; > 0."""
    max_bad_steps: int = 10
    """So many steps in a row whose loss or gradient is not finite end the run; fewer are left out; >= 1."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """Cross-entropy of the supervised slots."""

    recompute: Recompute = Recompute.in_forward
    """in_forward | reentrant | non_reentrant | none: how its gradient is made; all are equal."""
    position_weight: PositionWeight = PositionWeight.decay
    """decay: slot k weighs exp(-(k-1)/gamma) | uniform | dpace: by what the drafter itself finds
    likely (D-PACE)."""
    position_gamma: float | None = None
    """Of `decay`; > 0; null: by block size, 7 for 16, 5 for 10, 4 for 8."""
    dpace_alpha: float = 0.5
    """Of `dpace`: added confidence, so that a hopeless slot does not void those after it; 0..1."""
    chunk_rows: int = 5120
    """Slots whose logits exist at a time, at most; >= 1. Chunks are made equal."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Exact greedy accept length on held-out text."""

    every: int = 500
    """Steps between evaluations; 0: only at start and end."""
    at_start: bool = True
    """Also before the first step: the untrained drafter."""
    max_documents: int = 128
    """Held-out documents used, the first ones; >= 1."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Metrics. `metrics.jsonl` is always written."""

    wandb: Wandb = Wandb.offline
    """online | offline | disabled. Offline needs neither login nor network."""
    project: str = "dflash_ddp"
    """wandb project."""
    every: int = 10
    """Steps between rows; >= 1."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Trainer state and drafter, to go on from."""

    every: int = 500
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 3
    """Newest checkpoints kept; >= 1."""
    keep_every: int = 0
    """Checkpoints at multiples of so many steps are kept for good; 0: none."""
    export: Export = Export.best
    """best: export/ is the drafter with the highest held-out accept length, whose checkpoint is kept | last."""
    on_error: OnError = OnError["continue"]
    """continue: a checkpoint that cannot be written is reported and tried again with the next | stop: end the run."""
    upload: str | None = None
    """Also copy checkpoints and export/ there, in the background: s3://bucket/prefix or any address of fsspec."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Where time and memory go."""

    steps: list[int] | None = None
    """[first, end): steps, from 0, whose traces the first rank of each role writes to `profile/`; null: none."""
    memory: bool = False
    """Remember where memory was allocated, for the snapshot that is written when it runs out."""


@dataclass(kw_only=True, slots=True)
class Config:
    """One run."""

    name: str = "dev"
    """Identity of the run: the same name is the same directory."""
    output_dir: str = "outputs/${name}"
    """Everything the run writes."""
    seed: int = 0
    """Of weights, data order and anchors; >= 0."""
    steps: int | None = None
    """Optimizer steps; null: as many as `epochs` needs."""
    epochs: int = 6
    """Passes over the text when `steps` is null; >= 1."""
    tokens_per_batch: int = 49_152
    """Token budget of a packed batch; a multiple of 128."""
    batches_per_step: int = 3
    """Packed batches of one optimizer step, over all drafter ranks; a multiple of split.drafters."""
    resume: str = "auto"
    """auto: go on from the newest complete checkpoint, if any | none | a checkpoint's folder."""
    resume_other_drafters: bool = False
    """Go on with another split.drafters than the checkpoint's: the same packs in each step, other rounding."""
    max_hours: float | None = None
    """Save and end after so many hours, as on SIGTERM; > 0; null: no limit. Leave time for the last save."""
    device: Device = Device.auto
    """auto | cuda | cpu."""
    dry_run: bool = False
    """Check settings, files, tokenizer, a sample of the text, memory and write access; start nothing."""
    heartbeat_timeout_s: float = 60.0
    """A rank whose heart has stopped for so long ends the run; > 0."""
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def world_size(self) -> int:
        """Processes that the split asks for."""
        return self.split.drafters + (0 if self.split.colocated else self.split.targets)

    @property
    def microbatches(self) -> int:
        """Packed batches of one step on one drafter rank."""
        return self.batches_per_step // self.split.drafters


ConfigStore.instance().store(name="schema", node=Config)
