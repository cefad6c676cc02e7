"""Which split? Predicts tokens a second and memory of every one, before anything is loaded.

    python -m dflash_ddp.plan [any training settings] gpus=8 gpu=h200|h100|b200|a100|rtx6000pro|auto
                              [measure=true] [json=true]

Reads the target's config.json and nothing else of it. `measure=true` times a few real steps of both roles on this
machine's device, with random weights, instead of predicting them. The last line is a recommendation; with `json=true`
the output is one JSON object.
"""

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_ddp import costs
from dflash_ddp.batch import PackedBatch
from dflash_ddp.bench.drafter import DrafterBench
from dflash_ddp.bench.measure import milliseconds, reset_peak
from dflash_ddp.bench.options import read_options, split_settings
from dflash_ddp.bench.workloads import random_batch
from dflash_ddp.config import Config, ConfigError
from dflash_ddp.costs import GIB, GPUS, Gpu
from dflash_ddp.facts import Facts, read_facts
from dflash_ddp.log import USER_ERROR, tell
from dflash_ddp.preflight import device_type, torch_dtype
from dflash_ddp.settings import override_problems, parse
from dflash_ddp.target.capture import Target
from dflash_ddp.target.compiled import compile_layers
from dflash_ddp.target.model import random_target
from dflash_ddp.target.tables import read_config
from dflash_ddp.train import CONF_DIR

MEASURED_STEPS = 5  # their median counts, not what others on the machine do to one or two


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What to plan for; further words are settings of the training command."""

    gpus: int | None = None
    """Ranks in all; >= 1; null: as many as the settings ask for."""
    gpu: str = "auto"
    """What they are, a key of `costs.GPUS`; auto: this machine's."""
    measure: bool = False
    """Time a few real steps instead of predicting them, with the CPU threads that a rank will have."""
    json: bool = False
    """Print one JSON object."""


def take_threads_of_rank(ranks: int) -> None:
    """From here on compute with as many CPU threads as a rank: torchrun gives each of several one, unless told."""
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def measure(facts: Facts) -> tuple[float, float]:
    """Seconds a token of one rank of each role, from a few real steps on this machine's device."""
    config, device = facts.config, torch.device(device_type(facts.config.device))
    tokens, longest = config.tokens_per_batch, config.data.max_length
    document = next(n for n in range(longest, 0, -1) if tokens % n == 0)
    rows = facts.spec.table_rows
    batches = [random_batch(index, tokens, document, table_rows=rows) for index in range(2)]
    target_ms = _measure_target(facts, batches[0], device)
    gc.collect()  # the target and its hooks hold each other, and the drafter needs the memory
    reset_peak(device)
    drafter_ms = _measure_drafter(facts, batches, device)
    return target_ms / 1e3 / tokens, drafter_ms / 1e3 / tokens


def _measure_target(facts: Facts, batch: PackedBatch, device: torch.device) -> float:
    """Median milliseconds of a packed batch through the target, with random weights."""
    config = facts.config.target
    model = random_target(
        read_config(config.path, config.revision, config.trust_remote_code),
        capture_layers=facts.layers,
        dtype=torch_dtype(config.dtype, device.type),
        device=device,
        seed=0,
        attention=config.attention,
    )
    if device.type == "cuda" if config.compile is None else config.compile:
        compile_layers(model)
    target = Target(model, facts.layers, max_row_tokens=config.row_tokens)
    size = batch.num_tokens, target.feature_width
    out_SC = torch.empty(size, dtype=model.dtype, device=device)
    return _median_ms(lambda: target.features(batch, out_SC), device)


def _measure_drafter(facts: Facts, batches: list[PackedBatch], device: torch.device) -> float:
    """Median milliseconds of forward, backward and update of a packed batch."""
    config = facts.config
    bench = DrafterBench(
        facts.shape,
        device,
        batches,
        table_rows=facts.spec.table_rows,
        num_anchors=config.drafter.num_anchors,
        loss=config.loss,
        dtype=config.drafter.dtype,
    )

    def step() -> None:
        bench.forward_backward()
        bench.update()
        bench.forget()

    return _median_ms(step, device)


def _median_ms(step: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):  # compile, and do not count
        step()
    return statistics.median(milliseconds(step, device) for _ in range(MEASURED_STEPS))


def make_plan(
    facts: Facts,
    gpus: int,
    gpu: Gpu | None,
    measured: tuple[float, float] | None,
    *,
    batches_per_step: int | None = None,
) -> dict[str, Any]:
    """Everything that is printed, as plain values. Without `gpu`, memory is not judged.

    Args:
        facts: from `read_facts`.
        gpus: ranks in all.
        gpu: what they are; needed unless measured.
        measured: seconds a token of one rank of each role.
        batches_per_step: if it is given and does not follow the split.
    """
    config = facts.config
    if measured is None:
        assert gpu is not None
        target_s, drafter_s = facts.target_seconds(gpu), facts.drafter_seconds(gpu)
    else:
        target_s, drafter_s = measured
    target_parts, drafter_parts = facts.target_memory(), facts.drafter_memory()
    splits = costs.split_rates(gpus, 1 / target_s, 1 / drafter_s)
    rows = _split_rows(facts, gpus, gpu, splits, batches_per_step)
    fitting = [row for row in rows if row["fits"] is not False]
    free, best = _fastest(fitting), _fastest([row for row in fitting if row["allowed"]])
    plan = {
        "gpu": gpu.name if gpu else None,
        "gpus": gpus,
        "measured": measured is not None,
        "target_gflop_per_token": facts.target_flops() / 1e9,
        "drafter_gflop_per_token": facts.drafter_flops() / config.tokens_per_batch / 1e9,
        "feature_bytes_per_token": costs.feature_bytes(facts.shape),
        "drafter_parameters": costs.drafter_parameters(facts.shape),
        "target_memory_gib": {k: round(n / GIB, 2) for k, n in target_parts.items()},
        "drafter_memory_gib": {k: round(n / GIB, 2) for k, n in drafter_parts.items()},
        "batches_per_step": batches_per_step,
        "num_anchors": config.drafter.num_anchors,
        "splits": rows,
        "best": best["split"] if best else None,
    }
    return plan | {"recommendation": recommend(plan, best, free)}


def _split_rows(
    facts: Facts,
    gpus: int,
    gpu: Gpu | None,
    splits: Iterable[costs.SplitRate],
    batches_per_step: int | None,
) -> list[dict[str, Any]]:
    """The table: rates and memory of each split, and whether it fits and batches_per_step allows it."""
    fixed = facts.fixed_share()
    both = facts.rank_memory("colocated")
    sums = facts.rank_memory("target"), facts.rank_memory("drafter")
    rows: list[dict[str, Any]] = []
    for split in splits:
        needed = (both,) if split.colocated else sums
        rows.append(
            {
                "split": split.name,
                "targets": gpus if split.colocated else split.targets,
                "drafters": split.drafters,
                "tokens_per_s": round(split.rate),
                "target_tokens_per_s": round(split.target_rate),
                "drafter_tokens_per_s": round(split.drafter_rate),
                "memory_gib": [round(n / GIB, 1) for n in needed],
                "fits": None if gpu is None else all(costs.fits(n, gpu) for n in needed),
                "allowed": batches_per_step is None or batches_per_step % split.drafters == 0,
                "balancing_anchors": costs.balancing_anchors(
                    split, facts.config.drafter.num_anchors, fixed
                ),
            }
        )
    return rows


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest split; colocated only if there is no other."""
    apart = [row for row in rows if row["split"] != "colocated"]
    return max(apart or rows, key=lambda row: row["tokens_per_s"], default=None)


def recommend(
    plan: dict[str, Any], best: dict[str, Any] | None, free: dict[str, Any] | None
) -> str:
    """One sentence: the split to take, and `free`, were batches_per_step free, if that is another."""
    if best is None:
        return (
            f"No split fits {plan['gpu']}: lower tokens_per_batch, drafter.num_anchors or "
            "target.row_tokens, or take GPUs with more memory."
        )
    how = "measured" if plan["measured"] else "predicted"
    together = plan["splits"][-1]
    named = f"split=colocated split.targets={plan['gpus']} split.drafters={plan['gpus']}"
    if best is together:
        return f"Take {named}: {best['tokens_per_s']:,} tokens/s {how}, every rank in both roles."
    targets, drafters = best["target_tokens_per_s"], best["drafter_tokens_per_s"]
    slower, other = ("targets", drafters) if targets <= drafters else ("drafters", targets)
    idle, anchors = 1 - min(targets, drafters) / other, best["balancing_anchors"]
    balance = f", nobody would at drafter.num_anchors={anchors:,}" if anchors else ""
    sentence = (
        f"Take split.targets={best['targets']} split.drafters={best['drafters']}: "
        f"{best['tokens_per_s']:,} tokens/s {how}; the {slower} set the pace, the others wait "
        f"{idle:.0%} of the time{balance}"
    )
    if free is not None and free is not best:
        sentence += (
            f"; split.targets={free['targets']} split.drafters={free['drafters']} reaches "
            f"{free['tokens_per_s']:,}, if batches_per_step={plan['batches_per_step']} may become a "
            f"multiple of {free['drafters']}"
        )
    if together["fits"] is not False and together["tokens_per_s"] > best["tokens_per_s"]:
        sentence += f"; {named} leaves nobody waiting, {together['tokens_per_s']:,}"
        if plan["batches_per_step"] is None or not together["allowed"]:
            sentence += f", if batches_per_step may be a multiple of {plan['gpus']}"
    return sentence + "."


def table(plan: dict[str, Any]) -> str:
    """The plan for people, all but its recommendation."""
    both = [
        f"{role} rank: {plan[f'{role}_gflop_per_token']:,.1f} GFLOP/token; memory "
        + ", ".join(f"{name} {gib}" for name, gib in plan[f"{role}_memory_gib"].items())
        + " GiB"
        for role in ("target", "drafter")
    ]
    where = f"{plan['gpus']} x {plan['gpu'] or 'this device'}"
    lines = [where, *both, f"a lane carries {plan['feature_bytes_per_token']:,} bytes/token", ""]
    form = "{:>10} {:>12} {:>12} {:>12} {:>15} {:>5} {:>9}"
    names = ("split", "targets/s", "drafters/s", "tokens/s", "GiB T | D", "fits", "balance")
    lines.append(form.format(*names))
    for row in plan["splits"]:
        cells = (row["target_tokens_per_s"], row["drafter_tokens_per_s"], row["tokens_per_s"])
        lines.append(
            form.format(
                row["split"] + ("" if row["allowed"] else "*"),
                *(f"{n:,}" for n in cells),
                " | ".join(f"{gib:.1f}" for gib in row["memory_gib"]),
                {True: "yes", False: "no", None: "?"}[row["fits"]],
                f"{row['balancing_anchors']:,}" if row["balancing_anchors"] else "-",
            )
        )
    if not all(row["allowed"] for row in plan["splits"]):
        lines.append(
            f"* not with batches_per_step={plan['batches_per_step']}: no multiple of drafters"
        )
    note = "tokens of training text a second; balance: drafter.num_anchors at which no role waits"
    return "\n".join([*lines, note])


def load_config(overrides: list[str]) -> Config:
    """The settings that training would have with these overrides.

    Raises:
        ConfigError: one of them cannot work.
    """
    return parse(compose_tree(overrides))


def compose_tree(overrides: list[str]) -> DictConfig:
    """The same before it is checked, with interpolations; a ConfigError for a wrong word, group or key."""
    if wrong := override_problems(overrides):
        raise ConfigError("\n".join(wrong))
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return compose("train", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error


def read_settings(overrides: list[str]) -> tuple[Config, int | None]:
    """The settings, and batches_per_step if they fix it: by default it follows the split.

    Raises:
        ConfigError: one of them cannot work.
    """
    tree = compose_tree(overrides)
    batches = None
    if not OmegaConf.is_interpolation(tree, "batches_per_step"):
        batches = OmegaConf.select(tree, "batches_per_step")
        if isinstance(batches, int) and batches >= 1:
            # The split is still to be chosen: it need not go with the one that they happen to name.
            tree.batches_per_step = "${split.drafters}"
    return parse(tree), batches


def choose_gpu(name: str) -> Gpu | None:
    """The GPU of `gpu=`; auto looks at this machine, and finds None on one without."""
    if name != "auto":
        return GPUS[name]
    return costs.find_gpu(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def main() -> None:
    """Print the plan of the command line's settings."""
    own, settings = split_settings(PlanOptions, sys.argv[1:])
    try:
        options = read_options(PlanOptions, own)
        config, batches = read_settings(settings)
        gpu = choose_gpu(options.gpu)
        if gpu is None and not options.measure:
            raise ConfigError(
                f"gpu=auto finds none that it knows here; name one: {', '.join(GPUS)}"
            )
        facts = read_facts(config)
        gpus = options.gpus or config.world_size
        take_threads_of_rank(gpus)
        measured = measure(facts) if options.measure else None
        plan = make_plan(facts, gpus, gpu, measured, batches_per_step=batches)
    except ValueError as error:
        tell(error)
        raise SystemExit(USER_ERROR) from None
    text = json.dumps(plan) if options.json else f"{table(plan)}\n{plan['recommendation']}"
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
