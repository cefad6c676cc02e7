"""The drafter's step: forward, backward and optimizer on one microbatch of a workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_ddp.batch import PackedBatch
from dflash_ddp.bench.measure import (
    Product,
    alternate,
    compile_seconds,
    milliseconds,
    peak_gib,
    product_shares,
    questions,
    reset_peak,
    spread,
    this_device,
)
from dflash_ddp.bench.workloads import WORKLOADS, Workload, drafter_shape, random_batch
from dflash_ddp.config import Dtype, LossConfig, OptimConfig, Recompute
from dflash_ddp.drafter.blocks import make_blocks, sample_anchors
from dflash_ddp.drafter.inputs import HostInputs, host_inputs, to_device
from dflash_ddp.drafter.model import Drafter, DrafterShape
from dflash_ddp.drafter.optim import clip_gradients, make_optimizer
from dflash_ddp.drafter.step import (
    Tables,
    compile_step,
    forward_backward,
    loss_settings,
)
from dflash_ddp.preflight import torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterOptions:
    """What is trained."""

    workload: str = "tiny"
    """Whose drafter."""
    repeats: int = 5
    """Steps that count."""
    chunk_rows: int = LossConfig().chunk_rows
    """As in `LossConfig`."""
    recompute: Recompute = LossConfig().recompute
    """How the loss gets its gradient."""


class DrafterBench:
    """A drafter with random weights, and its microbatches of random tokens."""

    def __init__(
        self,
        shape: DrafterShape,
        device: torch.device,
        batches: Sequence[PackedBatch],
        *,
        table_rows: int,
        num_anchors: int,
        loss: LossConfig,
        dtype: Dtype = Dtype.auto,
    ) -> None:
        """Allocate weights, tables and features; compile on GPUs.

        Args:
            shape: the drafter's.
            device: where it computes.
            batches: of S tokens each; steps take them in turn.
            table_rows: V.
            num_anchors: N.
            loss: its `chunk_rows` and `recompute`.
            dtype: compute dtype.
        """
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Drafter(shape)
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=shape.initializer_range)
            kind, width = torch_dtype(dtype, device.type), shape.hidden_size
            tables = [torch.randn(table_rows, width, dtype=kind).mul_(0.02) for _ in range(2)]
            size = batches[0].num_tokens, shape.num_capture_layers * width
            self.features_SC = torch.randn(size, dtype=kind)
            self.scale = torch.tensor(1e-4)
        self.tables = Tables(*tables)
        self.loss = loss_settings(loss, num_anchors * (shape.block_size - 1))
        if device.type == "cuda":
            self.loss = self.loss._replace(functions=compile_step(self.model))
        self.optimizer = make_optimizer(self.model, OptimConfig())
        self.hosts = [self._host_inputs(batch, num_anchors) for batch in batches]
        self._index = 0

    def _host_inputs(self, batch: PackedBatch, num_anchors: int) -> HostInputs:
        blocks = make_blocks(
            batch,
            sample_anchors(batch, num_anchors, seed=0),
            num_anchors=num_anchors,
            block_size=self.shape.block_size,
            gamma=7.0,
        )
        return host_inputs(
            batch,
            blocks,
            self.shape,
            context_length=len(self.features_SC),
            chunk_rows=self.loss.chunk_rows,
            flex=self.device.type == "cuda",
        )

    @property
    def num_rows(self) -> int:
        """Supervised slots of the first microbatch: rows that reach the head."""
        return int(self.hosts[0].arrays["supervised_NB"].sum())

    def forward_backward(self) -> torch.Tensor:
        """Copy in the next microbatch, forward, backward; the sum of its weighted losses."""
        self._index = (self._index + 1) % len(self.hosts)
        inputs = to_device(self.hosts[self._index], self.shape, self.device)
        result = forward_backward(
            self.model, self.tables, self.features_SC, inputs, scale=self.scale, loss=self.loss
        )
        return result.loss_sum

    def update(self) -> None:
        """Clip and step, as training does."""
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()

    def forget(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)

    def release(self) -> None:
        """Give the memory back, for the products that follow."""
        del self.model, self.tables, self.features_SC, self.optimizer


def workload_drafter(work: Workload, device: torch.device, loss: LossConfig) -> DrafterBench:
    """The drafter of a workload, and two batches."""
    rows, sizes = work.table_rows, (work.tokens, work.document)
    batches = [random_batch(index, *sizes, table_rows=rows) for index in range(2)]
    return DrafterBench(
        drafter_shape(work),
        device,
        batches,
        table_rows=rows,
        num_anchors=work.num_anchors,
        loss=loss,
    )


def drafter_products(work: Workload, num_rows: int) -> list[Product]:
    """Every product of a step, forward and backward.

    Counts what the published layout computes: all N * B slots in every layer.
    """
    hidden, inner = work.hidden_size, work.intermediate_size
    slots = work.num_anchors * work.block_size
    query, key = work.num_heads * work.head_dim, work.num_key_value_heads * work.head_dim
    forward = [(work.tokens, work.num_layers * hidden, hidden, 1)]
    each = [
        (work.tokens, hidden, 2 * key, 1),
        (slots, hidden, query + 2 * key, 1),
        (slots, query, hidden, 1),
        (slots, hidden, 2 * inner, 1),
        (slots, inner, hidden, 1),
    ]
    forward += [(m, k, n, work.num_layers) for m, k, n, _ in each]
    products = []
    for m, k, n, often in forward:
        products += [(m, k, n, often), (k, m, n, often)]
        if k != work.num_layers * hidden:  # no gradient flows to the features
            products.append((m, n, k, often))
    head = [(num_rows, hidden, work.table_rows, 1), (num_rows, work.table_rows, hidden, 1)]
    return [*products, *head]


def bench_drafter(options: DrafterOptions) -> dict[str, Any]:
    """One row: forward and backward, and the optimizer step by itself."""
    work, device, repeats = WORKLOADS[options.workload], this_device(), options.repeats
    loss = LossConfig(chunk_rows=options.chunk_rows, recompute=options.recompute)
    bench = workload_drafter(work, device, loss)

    def first() -> None:
        for _ in range(2):
            bench.forward_backward()
            bench.forget()

    compiled = compile_seconds(first, device) if device.type == "cuda" else {}
    first()
    reset_peak(device)
    times = []
    for _ in range(repeats):
        times += alternate({"step": bench.forward_backward}, device, repeats=1)["step"]
        bench.forget()
    row: dict[str, Any] = spread(times)

    def steps() -> None:
        for _ in range(repeats):
            bench.forward_backward()
            bench.forget()

    # As in training, where the host prepares a step while the GPU works at the one before.
    row["ms_back_to_back"] = round(milliseconds(steps, device) / repeats, 1)
    row["tokens_per_s"] = round(work.tokens / row["ms"] * 1e3)
    row["peak_gib"] = peak_gib(device)
    row |= questions(bench.forward_backward, device) | compiled
    bench.update()
    updates = alternate({"update": bench.update}, device, repeats=repeats)["update"]
    row["optimizer_ms"] = spread(updates)["ms"]
    row["peak_gib_with_optimizer"] = peak_gib(device)
    num_rows = bench.num_rows
    bench.release()
    reset_peak(device)
    return row | product_shares(drafter_products(work, num_rows), row["ms"], device)
