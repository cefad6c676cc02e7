"""Capture of context features, beside the plain transformers call that returns all hidden states."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_ddp.batch import PackedBatch
from dflash_ddp.bench.measure import (
    Product,
    alternate,
    compile_seconds,
    peak_gib,
    product_shares,
    questions,
    reset_peak,
    spread,
    this_device,
)
from dflash_ddp.bench.workloads import WORKLOADS, Workload, random_batch, target_config
from dflash_ddp.config import Dtype
from dflash_ddp.preflight import torch_dtype
from dflash_ddp.target.capture import Target
from dflash_ddp.target.compiled import compile_layers
from dflash_ddp.target.model import random_target

DOCUMENT = 2_048


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOptions:
    """What is captured."""

    workload: str = "tiny"
    """Whose target."""
    repeats: int = 5
    """Calls that count."""


class TargetBench:
    """A target with random weights, twice: as training runs it, and plain, on the same weights."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        """Make both on the device; compile ours."""
        config, dtype = target_config(work), torch_dtype(Dtype.auto, device.type)
        document = min(DOCUMENT, work.target_tokens // 2)
        self.batch = random_batch(0, work.target_tokens, document, table_rows=work.table_rows)
        ours = random_target(
            target_config(work),
            capture_layers=work.capture_layers,
            dtype=dtype,
            device=device,
            seed=0,
        )
        with torch.device(device):
            self.plain = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            ).eval()
        for name, parameter in ours.named_parameters():
            module, _, leaf = name.rpartition(".")
            setattr(self.plain.model.get_submodule(module), leaf, parameter)
        compile_layers(ours)
        self.products = target_products(ours, work.target_tokens)
        self.target = Target(ours, work.capture_layers, max_row_tokens=work.target_tokens)
        width = self.target.feature_width
        self.features_SC = torch.zeros(work.target_tokens, width, dtype=dtype, device=device)
        self.ids_RL = torch.from_numpy(
            self.batch.input_ids.astype(np.int64).reshape(-1, document)
        ).to(device)

    def capture(self, batch: PackedBatch | None = None) -> None:
        """What a target rank does for an item."""
        self.target.features(batch or self.batch, self.features_SC)

    @torch.no_grad()
    def plain_call(self) -> tuple[Tensor, ...]:
        """What a few lines of transformers do."""
        return self.plain(
            input_ids=self.ids_RL, output_hidden_states=True, use_cache=False
        ).hidden_states

    def relative_errors(self) -> list[float]:
        """Mean over tokens of |ours - plain| / |plain|, for each captured layer."""
        self.capture()
        hidden, errors = self.plain_call(), []
        for ordinal, layer in enumerate(self.target.capture_layers):
            expected_SH = hidden[layer + 1].flatten(0, 1).float()
            found_SH = self.features_SC[:, self.target.columns(ordinal)].float()
            error_S = (found_SH - expected_SH).norm(dim=-1) / expected_SH.norm(dim=-1)
            errors.append(float(f"{error_S.mean().item():.2g}"))
        return errors


def target_products(model: PreTrainedModel, tokens: int) -> list[Product]:
    """Every linear layer that capture runs."""
    shapes = Counter(
        tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)
    )
    return [(tokens, width, out, often) for (out, width), often in shapes.items()]


def bench_target(options: TargetOptions) -> dict[str, Any]:
    """One row; ours and the plain call take turns."""
    work, device = WORKLOADS[options.workload], this_device()
    bench = TargetBench(work, device)
    compiled = compile_seconds(bench.capture, device) if device.type == "cuda" else {}
    bench.capture()
    bench.plain_call()
    times = alternate(
        {"capture": bench.capture, "plain": bench.plain_call}, device, repeats=options.repeats
    )
    reset_peak(device)
    row: dict[str, Any] = spread(times["capture"])
    bench.capture()
    row["peak_gib"] = peak_gib(device)
    row["tokens_per_s"] = round(work.target_tokens / row["ms"] * 1e3)
    row["plain_ms"] = spread(times["plain"])["ms"]
    row["times_plain"] = round(row["plain_ms"] / row["ms"], 3)
    row |= questions(bench.capture, device) | compiled
    row["relative_errors"] = bench.relative_errors()
    products = bench.products
    del bench
    reset_peak(device)
    return row | product_shares(products, row["ms"], device)
