"""Real training at a workload's shapes with random target weights, beside its parts alone: same code, same call.

The text is real but long: the demo's rows joined into documents that fill the workload's length, nearly all of it
answer, as in the drafter's benchmark. The target is config.json of the workload's shapes; its weights are made on the
device (`target.random_weights`), so nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dflash_ddp.bench.workloads import WORKLOADS, Workload, target_config
from dflash_ddp.config import Config
from dflash_ddp.metrics_file import read_rows
from dflash_ddp.settings import saved_settings

DEMO = Path("demo")
PARTS_TIMEOUT_S, RUN_TIMEOUT_S = 300, 540
SKIPPED_STEPS = 4  # the first compile, and fill the slots


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """What is trained; further words are settings of the training command."""

    workload: str = "tiny"
    """Whose target and drafter."""
    split: str = "1t1d"
    """A choice of conf/split."""
    steps: int = 12
    """Optimizer steps; the first `SKIPPED_STEPS` do not count."""
    parts: bool = True
    """Also measure both roles alone, and give the run's share of what they allow."""


def bench_pipeline(options: PipelineOptions, *settings: str) -> dict[str, Any]:
    """One row; `settings` are further ones of the training command."""
    name, work = options.workload, WORKLOADS[options.workload]
    alone = (
        {role: part_alone(role, name) for role in ("target", "drafter")} if options.parts else {}
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, work)
        config, rows = train(folder, options, settings)
    return summary(rows) | (share_of_parts(work, config, rows, alone) if alone else {})


def share_of_parts(
    work: Workload,
    config: Config,
    rows: list[dict[str, Any]],
    alone: dict[str, dict[str, Any]],
) -> dict[str, float]:
    """The run's rate beside the least of its roles' rates; colocated, both take their turn."""
    split, batches = config.split, config.batches_per_step
    step_s = alone["drafter"]["ms"] / 1e3 * config.microbatches
    step_s += alone["drafter"]["optimizer_ms"] / 1e3
    drafter_rate = work.tokens * batches / step_s
    target_rate = alone["target"]["tokens_per_s"] * split.targets
    in_turn = 1 / (1 / target_rate + 1 / drafter_rate)
    ideal = in_turn if split.colocated else min(target_rate, drafter_rate)
    return {
        "targets_alone_tokens_per_s": round(target_rate),
        "drafters_alone_tokens_per_s": round(drafter_rate),
        "ideal_tokens_per_s": round(ideal),
        "share_of_ideal": round(summary(rows)["tokens_per_s"] / ideal, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The steady part of metrics.jsonl: rate, and seconds a step that a rank of each role waited."""
    trained = [row for row in rows if "train/loss" in row]
    steady = trained[SKIPPED_STEPS:]
    seconds = sum(row["speed/step_s"] for row in steady)
    return {
        "tokens_per_s": round(
            (steady[-1]["tokens"] - trained[SKIPPED_STEPS - 1]["tokens"]) / seconds
        ),
        "step_s": round(seconds / len(steady), 3),
        "target_wait_s": round(sum(row["wait/target"] for row in steady) / len(steady), 3),
        "drafter_wait_s": round(sum(row["wait/drafter"] for row in steady) / len(steady), 3),
        "first_loss": trained[0]["train/loss"],
        "last_loss": trained[-1]["train/loss"],
    }


def part_alone(role: str, name: str) -> dict[str, Any]:
    """The row of another benchmark, in a process of its own, whose memory is free again after it."""
    command = [sys.executable, "-m", "dflash_ddp.bench", role, f"workload={name}", "repeats=3"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=PARTS_TIMEOUT_S)
    return json.loads(done.stdout.splitlines()[-1])


def write_inputs(folder: Path, work: Workload) -> None:
    """A target without weights, and text whose documents fill the workload's length."""
    target = folder / "target"
    target_config(work).save_pretrained(target)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / "target" / file, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    with (DEMO / "train.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["messages"] for line in lines]
    documents, answer, length = [], "", 0
    for messages in texts:
        answer += "\n".join(message["content"] for message in messages)
        length = len(tokenizer(answer)["input_ids"]) if len(answer) > work.document else 0
        if length > work.document:
            turns = [
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": answer},
            ]
            documents.append(json.dumps({"messages": turns}) + "\n")
            answer = ""
    per_batch = work.tokens // work.document  # batches are full, so that all take one time
    whole = documents[: len(documents) // per_batch * per_batch]
    (folder / "text.jsonl").write_text("".join(whole), encoding="utf-8")


def train(
    folder: Path, options: PipelineOptions, settings: Sequence[str]
) -> tuple[Config, list[dict[str, Any]]]:
    """Train; the run's settings, and the rows of metrics.jsonl."""
    run, work = folder / "run", WORKLOADS[options.workload]
    command = [sys.executable, "-m", "dflash_ddp.train", *training_settings(folder, work)]
    command += [f"split={options.split}", f"steps={options.steps}", f"output_dir={run}", *settings]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=False, stdout=sys.stderr, timeout=RUN_TIMEOUT_S, env=environment
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return saved_settings(run), read_rows(run)


def training_settings(folder: Path, work: Workload) -> list[str]:
    """The workload as settings of a training command."""
    return [
        "name=bench",
        f"target.path={folder / 'target'}",
        "target.random_weights=true",
        f"target.capture_layers={list(work.capture_layers)}",
        f"target.row_tokens={work.target_tokens}",
        f"data.path={folder / 'text.jsonl'}",
        "data.heldout=null",
        f"data.cache_dir={folder / 'cache'}",
        f"data.max_length={work.document}",
        f"tokens_per_batch={work.tokens}",
        f"drafter.num_layers={work.num_layers}",
        f"drafter.sliding_layers={work.num_sliding}",
        f"drafter.num_anchors={work.num_anchors}",
        f"drafter.block_size={work.block_size}",
        f"drafter.intermediate_size={work.intermediate_size}",
        f"drafter.num_attention_heads={work.num_heads}",
        f"drafter.num_key_value_heads={work.num_key_value_heads}",
        f"drafter.head_dim={work.head_dim}",
        "batches_per_step=${split.drafters}",
        "eval.every=0",
        "checkpoint.every=0",
        "logging.every=1",
        "logging.wandb=disabled",
        "resume=none",
    ]
