"""What a run costs: operations, bytes and memory of target and drafter, from their configs alone. Pure.

In: `TargetSizes` (from config.json, see `target/sizes.py`), the drafter's shape, the settings and a `Gpu`. Out:
seconds a token of each role, bytes of each role's memory by what they are for, and the rate of each split.

Operations are counted exactly, as executed; time comes from three measured shares of the chip's product rate. They
were taken on an H200 whose large products reach 790 TFLOP/s, from `python -m dflash_ddp.bench drafter` (900 ms
headline, 251 ms 8b) and from target captures of Qwen3-8B (45,303 tokens/s) and Qwen3.6-27B (11,310 tokens/s).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_ddp.config import Config
from dflash_ddp.drafter.model import SLIDING, DrafterShape

GIB = 2**30
CEILING = 0.80  # of the vendor's dense bf16 rate, reached by one large product: 790 of 989 TFLOP/s
# Shares of that ceiling.
FULL_SHARE, LINEAR_SHARE = 0.81, 0.65  # products of target layers with full and linear attention
TARGET_ATTENTION_SHARE = 0.5
DRAFTER_SHARE, DRAFTER_ATTENTION_SHARE = 0.76, 0.30
PIPELINE = 0.97  # of the slower role's rate
RESERVE = 0.06  # of a GPU's memory: CUDA, NCCL, and what lies between allocations
SENDER_SLOTS = 2  # of a target rank: one is filled while the other is sent


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: dense bf16 TFLOP/s, GiB and TB/s of memory."""

    name: str
    tflops: float
    gib: float
    tb_per_s: float

    @property
    def flops(self) -> float:
        """Operations a second of one large product."""
        return self.tflops * 1e12 * CEILING


# NVIDIA's data sheets: dense bf16 without sparsity, SXM boards; GiB as the driver reports them.
GPUS = {
    "h200": Gpu("NVIDIA H200", 989, 139, 4.8),
    "h100": Gpu("NVIDIA H100", 989, 79, 3.35),
    "b200": Gpu("NVIDIA B200", 2250, 178, 8.0),
    "a100": Gpu("NVIDIA A100", 312, 79, 2.0),
    "rtx6000pro": Gpu("NVIDIA RTX PRO 6000", 504, 95, 1.8),
}


def find_gpu(device_name: str) -> Gpu | None:
    """The table's entry for a device as CUDA names it ("NVIDIA H100 80GB HBM3")."""
    return next((gpu for gpu in GPUS.values() if device_name.startswith(gpu.name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """The part of a target that runs: its layers up to the last captured one, no head.

    Attributes:
        weights: elements held: embedding and layers.
        full, linear: elements that each token is multiplied with, in layers with full and with linear attention.
        attention: query heads * head width, summed over the layers with full attention.
        widest: elements of a token's widest intermediate, such as gate, up and their product.
        hidden_size: as in `TargetSpec`.
    """

    weights: int
    full: int
    linear: int
    attention: int
    widest: int
    hidden_size: int


def target_flops(sizes: TargetSizes, document: int) -> tuple[int, int]:
    """Operations a token: of products, and of causal attention in documents of that length."""
    return 2 * (sizes.full + sizes.linear), 2 * sizes.attention * document


def target_seconds(sizes: TargetSizes, document: int, gpu: Gpu) -> float:
    """Predicted seconds a token of one target rank, layers compiled."""
    products = 2 * (sizes.full / FULL_SHARE + sizes.linear / LINEAR_SHARE)
    attention = target_flops(sizes, document)[1] / TARGET_ATTENTION_SHARE
    return (products + attention) / gpu.flops


def drafter_parameters(shape: DrafterShape) -> int:
    """Elements that are trained."""
    width, norms = shape.hidden_size, 2 * shape.hidden_size
    matrices = shape.num_capture_layers * width**2 + len(shape.layer_types) * sum(_matrices(shape))
    return matrices + norms + len(shape.layer_types) * (norms + 2 * shape.head_dim)


def _matrices(shape: DrafterShape) -> tuple[int, int, int]:
    """Elements of a layer: q; k and v; o and the SwiGLU."""
    width, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key_value = 2 * shape.num_key_value_heads * shape.head_dim
    return width * query, width * key_value, width * query + 3 * width * shape.intermediate_size


def drafter_flops(shape: DrafterShape, config: Config, table_rows: int) -> tuple[int, int]:
    """Operations of one full packed batch, forward and backward: of products, and of attention.

    Every block is taken for kept and wholly supervised, every document for as long as
    `data.max_length`, and blocks for spread evenly over it.
    """
    tokens, anchors = config.tokens_per_batch, config.drafter.num_anchors
    slots, drafted = anchors * shape.block_size, anchors * (shape.block_size - 1)
    query_width, (q, kv, rest) = shape.num_attention_heads * shape.head_dim, _matrices(shape)
    products = (
        4 * tokens * shape.num_capture_layers * shape.hidden_size**2
    )  # no gradient of features
    products += 4 * drafted * shape.hidden_size * table_rows  # nor of the head
    attention, last = 0, len(shape.layer_types) - 1
    for i, kind in enumerate(shape.layer_types):
        products += 6 * (tokens * kv + (anchors + 1 if i == 0 else slots) * (q + kv))
        products += 6 * (drafted if i == last else slots) * rest
        seen = _mean_context(
            config.data.max_length, shape.sliding_window if kind == SLIDING else None
        )
        # Forward two products, backward five, of the slot with what it sees.
        attention += int(14 * slots * query_width * (seen + shape.block_size))
    return products, attention


def _mean_context(document: int, window: int | None) -> float:
    """Context tokens that an anchor sees, averaged over its places in a document."""
    if window is None or window >= document:
        return document / 2
    return window - window * window / (2 * document)


def drafter_seconds(shape: DrafterShape, config: Config, table_rows: int, gpu: Gpu) -> float:
    """Predicted seconds a token of one drafter rank: forward, backward and its share of an optimizer step."""
    products, attention = drafter_flops(shape, config, table_rows)
    batch = (products / DRAFTER_SHARE + attention / DRAFTER_ATTENTION_SHARE) / gpu.flops
    # AdamW reads master, gradient and two moments and writes three of them; the clip reads once more.
    step = 32 * drafter_parameters(shape) / (gpu.tb_per_s * 1e12)
    return (batch + step / config.microbatches) / config.tokens_per_batch


def feature_bytes(shape: DrafterShape) -> int:
    """Bytes a token that cross a lane, bf16."""
    return 2 * shape.num_capture_layers * shape.hidden_size


def target_memory(sizes: TargetSizes, shape: DrafterShape, config: Config) -> dict[str, int]:
    """Bytes of a target rank by what they are for, bf16."""
    row_tokens = min(config.target.row_tokens, config.tokens_per_batch)
    working = 2 * row_tokens * (sizes.widest + 8 * sizes.hidden_size)
    slots = SENDER_SLOTS * config.tokens_per_batch * feature_bytes(shape)
    return {"weights": 2 * sizes.weights, "slots": slots, "activations": working}


def drafter_memory(
    shape: DrafterShape, config: Config, *, table_rows: int, tied: bool
) -> dict[str, int]:
    """Bytes of a drafter rank by what they are for, at the end of a forward pass, bf16 compute.

    Activations are those that the compiled layers keep: of a slot gate and up, query, key, value,
    attended and three rows of H; of a context token raw and turned keys and values. Predicts 40.5
    and 18.3 GiB where the benchmark's steps, without optimizer, reached 39 and 18.
    """
    parameters, tokens = drafter_parameters(shape), config.tokens_per_batch
    width, anchors = shape.hidden_size, config.drafter.num_anchors
    slots, drafted = anchors * shape.block_size, anchors * (shape.block_size - 1)
    heads = shape.num_attention_heads + shape.num_key_value_heads
    slot = 2 * shape.intermediate_size + 2 * heads * shape.head_dim + 3 * width
    context = 4 * shape.num_key_value_heads * shape.head_dim
    per_layer = slots * slot + tokens * context
    return {
        "masters, moments, gradients": 16 * parameters,
        "bf16 weights": 2 * parameters,
        "target's tables": 2 * table_rows * width * (1 if tied else 2),
        "slots": (config.split.depth + 1) * tokens * feature_bytes(shape),
        "activations": 2 * (len(shape.layer_types) * per_layer + 2 * tokens * width),
        "loss": 2 * (config.loss.chunk_rows * table_rows + 2 * drafted * width),
    }


def fits(num_bytes: float, gpu: Gpu) -> bool:
    """Whether that much memory is there, beside what CUDA and NCCL take."""
    return num_bytes <= gpu.gib * GIB * (1 - RESERVE)


@dataclass(frozen=True, slots=True)
class SplitRate:
    """Predicted tokens a second of one split; targets == 0 stands for colocated."""

    targets: int
    drafters: int
    target_rate: float
    drafter_rate: float

    @property
    def colocated(self) -> bool:
        """Every rank does both in turn."""
        return self.targets == 0

    @property
    def rate(self) -> float:
        """Of the whole run."""
        if self.colocated:
            return 1 / (1 / self.target_rate + 1 / self.drafter_rate)
        return PIPELINE * min(self.target_rate, self.drafter_rate)

    @property
    def name(self) -> str:
        """As in `split=5t3d`."""
        return "colocated" if self.colocated else f"{self.targets}t{self.drafters}d"


def split_rates(gpus: int, target_rate: float, drafter_rate: float) -> Iterator[SplitRate]:
    """Every split of `gpus` ranks, given the rates of one rank of each role; colocated last."""
    for drafters in range(1, gpus):
        targets = gpus - drafters
        yield SplitRate(targets, drafters, targets * target_rate, drafters * drafter_rate)
    yield SplitRate(0, gpus, gpus * target_rate, gpus * drafter_rate)


def balancing_anchors(split: SplitRate, anchors: int, fixed: float) -> int | None:
    """Anchors at which both roles of a split are as fast; None if it has none, or colocated.

    Args:
        split: with the rates at `anchors`.
        anchors: `drafter.num_anchors` of these rates.
        fixed: part of a drafter's time that does not depend on its anchors.
    """
    if split.colocated:
        return None
    wanted = split.drafter_rate / split.target_rate  # of a drafter's time, in what it takes now
    found = round(anchors * (wanted - fixed) / (1 - fixed))
    return found if found >= 1 else None
