"""Options of benchmarks and of the plan: `key=value` words -> a checked dataclass, beside settings of training."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from dflash_ddp.bench.pipeline import SKIPPED_STEPS
from dflash_ddp.bench.stream import WARM_UP_ITEMS
from dflash_ddp.bench.workloads import WORKLOADS
from dflash_ddp.config import ConfigError
from dflash_ddp.costs import GPUS
from dflash_ddp.settings import Options, broken_rules, command_line


def split_settings(schema: Any, words: list[str]) -> tuple[list[str], list[str]]:
    """The words that are options of `schema`, or nothing, and those that are settings."""
    keys = {field.name for field in fields(schema)}
    own = [w for w in words if w.partition("=")[0] in keys or not (w[:1] == "~" or "=" in w)]
    return own, [word for word in words if word not in own]


def read_options(schema: type[Options], words: list[str]) -> Options:
    """An instance of the dataclass whose values keep the rules.

    Raises:
        ConfigError: a word is no `key=value`, or its key, type or value is wrong.
    """
    options = command_line(schema, words)
    workloads = dict.fromkeys([*WORKLOADS, getattr(schema(), "workload", "tiny")])
    rules: Sequence[tuple[str, Callable[[Any], object], str]] = (
        ("repeats chunk_rows targets drafters gpus", lambda v: v >= 1, "must be >= 1"),
        ("target_ms drafter_ms slow_factor", lambda v: v > 0, "must be > 0"),
        ("mib", lambda v: v * 2**20 >= 1, "must be a byte or more"),
        ("jitter", lambda v: 0 <= v <= 1, "must lie in 0..1"),
        (
            "items",
            lambda v: v // getattr(options, "drafters", 1) > WARM_UP_ITEMS,
            f"must give each drafter more than {WARM_UP_ITEMS}: so many do not count",
        ),
        ("steps", lambda v: v > SKIPPED_STEPS, f"must be > {SKIPPED_STEPS}: so many do not count"),
        ("gib", lambda v: v and min(v) > 0, "must be numbers > 0"),
        ("ctas", lambda v: v and all(map(_is_ctas, v)), "must be whole numbers >= 1, or default"),
        ("workload", workloads.__contains__, f"must be one of {', '.join(workloads)}"),
        ("gpu", [*GPUS, "auto"].__contains__, f"must be one of {', '.join(GPUS)} or auto"),
    )
    own = [([k for k in keys.split() if hasattr(options, k)], ok, rule) for keys, ok, rule in rules]
    for problem in broken_rules(options, own):
        raise ConfigError(problem)
    return options


def _is_ctas(text: str) -> bool:
    return text == "default" or (text.isdecimal() and int(text) >= 1)
