"""`python -m dflash_ddp.bench drafter workload=headline|8b|tiny [key=value ...]`: one JSON row.

Times the code that training runs, on random weights, tokens and features of the real shapes. Every share is taken
in the same run: the chip's product rate on one large product, and the step's own products alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_ddp.batch import PackedBatch
from dflash_ddp.config import Recompute
from dflash_ddp.drafter.blocks import make_blocks, sample_anchors
from dflash_ddp.drafter.inputs import HostInputs, host_inputs, to_device
from dflash_ddp.drafter.model import FULL, SLIDING, Drafter, DrafterShape
from dflash_ddp.drafter.step import (
    LossSettings,
    Tables,
    compile_step,
    forward_backward,
    resolve_recompute,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Shapes of one benchmark: S tokens in documents of one length, N blocks of B."""

    tokens: int
    document: int
    num_anchors: int
    hidden_size: int
    intermediate_size: int
    table_rows: int
    num_sliding: int
    num_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    num_layers: int = 5
    block_size: int = 16
    prompt: int = 16


WORKLOADS = {
    "headline": Workload(49_152, 4_096, 2_048, 5_120, 17_408, 248_320, 4),
    "8b": Workload(16_384, 2_048, 1_024, 4_096, 12_288, 151_936, 0),
    "tiny": Workload(512, 128, 32, 64, 128, 512, 1, 4, 2, 16, 2),
}


def workload_shape(work: Workload) -> DrafterShape:
    """The drafter of a workload."""
    kinds = (SLIDING,) * work.num_sliding + (FULL,) * (work.num_layers - work.num_sliding)
    return DrafterShape(
        hidden_size=work.hidden_size,
        intermediate_size=work.intermediate_size,
        num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_key_value_heads,
        head_dim=work.head_dim,
        num_capture_layers=work.num_layers,
        layer_types=kinds,
        sliding_window=min(2_048, work.document // 2) if work.num_sliding else None,
        is_causal=None,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        block_size=work.block_size,
        mask_token_id=work.table_rows - 1,
    )


def random_batch(work: Workload, index: int) -> PackedBatch:
    """Random tokens in documents of one length; the prompt of each is not generated."""
    generator = np.random.default_rng(index)
    num_documents = work.tokens // work.document
    positions = np.tile(np.arange(work.document, dtype=np.int32), num_documents)
    return PackedBatch(
        index=index,
        input_ids=generator.integers(0, work.table_rows - 1, work.tokens, dtype=np.int32),
        positions=positions,
        loss_mask=positions >= work.prompt,
        document_lengths=np.full(num_documents, work.document, dtype=np.int32),
        document_ids=np.arange(num_documents),
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], Any], device: torch.device, *, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times


class DrafterBench:
    """A drafter at a workload's shapes with random weights, and its microbatches."""

    def __init__(
        self, work: Workload, device: torch.device, *, chunk_rows: int, recompute: Recompute
    ) -> None:
        """Allocate weights, tables and features; compile on GPUs."""
        cuda = device.type == "cuda"
        self.work, self.device, self.shape = work, device, workload_shape(work)
        dtype = torch.bfloat16 if cuda else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Drafter(self.shape)
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=self.shape.initializer_range)
            tables = [
                torch.randn(work.table_rows, work.hidden_size, dtype=dtype).mul_(0.02)
                for _ in range(2)
            ]
            width = work.num_layers * work.hidden_size
            self.features_SC = torch.randn(work.tokens, width, dtype=dtype)
            self.scale = torch.tensor(1e-4)
        self.tables = Tables(*tables)
        recompute = resolve_recompute(recompute)
        if cuda:
            self.loss = compile_step(self.model, chunk_rows=chunk_rows, recompute=recompute)
        else:
            self.loss = LossSettings(chunk_rows, recompute)
        self.hosts = [self.host(i) for i in range(4)]

    def host(self, index: int) -> HostInputs:
        """Microbatch `index`, in host memory."""
        work = self.work
        batch = random_batch(work, index)
        blocks = make_blocks(
            batch,
            sample_anchors(batch, work.num_anchors, seed=0),
            num_anchors=work.num_anchors,
            block_size=work.block_size,
            gamma=7.0,
        )
        return host_inputs(
            batch,
            blocks,
            self.shape,
            context_length=work.tokens,
            chunk_rows=self.loss.chunk_rows,
            flex=self.device.type == "cuda",
        )

    def step(self, index: int) -> torch.Tensor:
        """Copy in, forward, backward of one microbatch."""
        inputs = to_device(self.hosts[index % len(self.hosts)], self.shape, self.device)
        result = forward_backward(
            self.model, self.tables, self.features_SC, inputs, scale=self.scale, loss=self.loss
        )
        return result.loss_sum

    def release(self) -> None:
        """Give the memory back, for the products that follow."""
        del self.model, self.tables, self.features_SC

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)


def drafter_products(work: Workload, num_rows: int) -> list[tuple[int, int, int, int]]:
    """(rows, inner, columns, how often) of every product of a step, forward and backward.

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


def product_ms(m: int, k: int, n: int, device: torch.device) -> float:
    """Median milliseconds of one bf16 product on random data."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (
        torch.randn(m, k, device=device, dtype=dtype),
        torch.randn(n, k, device=device, dtype=dtype),
    )
    for _ in range(2):
        a @ b.T
    return statistics.median(timed(lambda: a @ b.T, device, repeats=3))


def bench_drafter(
    work: Workload, device: torch.device, *, chunk_rows: int, recompute: Recompute, repeats: int
) -> dict[str, Any]:
    """One JSON row of the drafter's forward and backward."""
    bench = DrafterBench(work, device, chunk_rows=chunk_rows, recompute=recompute)
    start = time.perf_counter()
    for index in range(2):
        bench.step(index)
        bench.zero_grad()
    synchronize(device)
    warm_up_s = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    counter = iter(range(10_000))
    times = []
    for _ in range(repeats):
        times += timed(lambda: bench.step(next(counter)), device, repeats=1)
        bench.zero_grad()
    median = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    num_rows = int(bench.hosts[0].arrays["supervised_NB"].sum())
    products = drafter_products(work, num_rows)
    flops = sum(2.0 * m * k * n * often for m, k, n, often in products)
    row = {
        "ms": round(median, 1),
        "ms_min": round(min(times), 1),
        "ms_max": round(max(times), 1),
        "tokens_per_s": round(work.tokens / median * 1e3),
        "peak_gib": round(peak, 1),
        "tflops": round(flops / median / 1e9, 1),
        "warm_up_s": round(warm_up_s, 1),
        "loss": round(bench.step(0).item() / bench.hosts[0].weight_sum, 4),
    }
    bench.release()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        size = 8192
        ceiling = 2 * size**3 / product_ms(size, size, size, device) / 1e9
        alone = sum(product_ms(m, k, n, device) * often for m, k, n, often in products)
        row |= {
            "ceiling_tflops": round(ceiling, 1),
            "share_of_ceiling": round(flops / median / 1e9 / ceiling, 3),
            "products_alone_ms": round(alone, 1),
            "share_of_products_alone": round(alone / median, 3),
        }
    return row


def main() -> None:
    """Parse `what key=value ...`, print one JSON row."""
    what, *pairs = sys.argv[1:] or [""]
    options = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    known = {"workload", "chunk_rows", "recompute", "repeats"}
    if what != "drafter" or len(options) < len(pairs) or options.keys() - known:
        raise SystemExit(
            "usage: python -m dflash_ddp.bench drafter [workload=headline|8b|tiny] "
            "[chunk_rows=4096] [recompute=in_forward|reentrant|non_reentrant|none] [repeats=5]"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.get("workload", "tiny")
    row = bench_drafter(
        WORKLOADS[name],
        device,
        chunk_rows=int(options.get("chunk_rows", 4096)),
        recompute=Recompute[options.get("recompute", "auto")],
        repeats=int(options.get("repeats", 5)),
    )
    text = {"bench": what, "workload": name, "torch": torch.__version__} | row
    sys.stdout.write(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
