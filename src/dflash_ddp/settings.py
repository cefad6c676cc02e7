"""From the composed tree to checked settings: the only place that sees Hydra's tree.

Unknown keys, wrong types and values out of bounds are refused with key, value and rule, all at once.
"""

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dflash_ddp.config import TILE, Config, ConfigError
from dflash_ddp.redaction import redact
from dflash_ddp.usage import usage

Options = TypeVar("Options")

Rule = tuple[Iterable[str], Callable[[Any], object], str]
"""Keys, test, rule in words; a value of None passes, its meaning is "chosen for you"."""

_AT_LEAST_ONE = (
    "epochs batches_per_step tokens_per_batch steps target.row_tokens drafter.num_layers "
    "drafter.num_anchors drafter.intermediate_size drafter.num_attention_heads "
    "drafter.num_key_value_heads drafter.head_dim drafter.sliding_window data.max_length "
    "split.targets split.drafters split.lane_ctas loss.chunk_rows eval.max_documents "
    "logging.every checkpoint.keep_last optim.max_bad_steps"
).split()
_AT_LEAST_ZERO = (
    "seed drafter.sliding_layers drafter.mask_token_id data.num_workers split.depth "
    "optim.weight_decay eval.every checkpoint.every checkpoint.keep_every"
).split()
_POSITIVE = (
    "heartbeat_timeout_s max_hours optim.lr optim.eps optim.max_grad_norm loss.position_gamma"
).split()
_SHARES = "data.max_bad_share optim.warmup_share optim.min_lr_share loss.dpace_alpha".split()
_DECAYS = "optim.beta1 optim.beta2".split()
_FOLDERS = "data.cache_dir drafter.init_from".split()


def problems(config: Config) -> list[str]:
    """Every rule that the settings break, each with key, value and rule; empty if none."""
    rules = (
        (_AT_LEAST_ONE, lambda v: v >= 1, "must be >= 1"),
        (_AT_LEAST_ZERO, lambda v: v >= 0, "must be >= 0"),
        (_POSITIVE, lambda v: v > 0 and math.isfinite(v), "must be > 0 and finite"),
        (["seed"], lambda v: v < 2**63, "must be below 2**63"),
        (_SHARES, lambda v: 0 <= v <= 1, "must lie in 0..1"),
        (_DECAYS, lambda v: 0 <= v < 1, "must be >= 0 and < 1"),
        (["resume"], str.strip, "must be auto, none or a checkpoint's folder"),
        (_FOLDERS, str.strip, "must not be empty, which would mean the working directory"),
    )
    found = list(broken_rules(config, rules))
    return found + _combination_problems(config) + _place_problems(config)


def broken_rules(options: Any, rules: Iterable[Rule]) -> Iterator[str]:
    """Key, value and rule where a rule does not hold; a value of None passes."""
    for keys, holds, rule in rules:
        for key in keys:
            value = attrgetter(key)(options)
            if value is not None and not holds(value):
                yield f"{key}={value} {rule}"


def _combination_problems(config: Config) -> list[str]:
    split, drafter, found = config.split, config.drafter, []
    if not 2 <= drafter.block_size <= TILE:
        found.append(f"drafter.block_size={drafter.block_size} must lie in 2..{TILE}")
    if config.tokens_per_batch % TILE:
        found.append(f"tokens_per_batch={config.tokens_per_batch} must be a multiple of {TILE}")
    if config.data.max_length > config.tokens_per_batch:
        found.append(
            f"data.max_length={config.data.max_length} must not exceed "
            f"tokens_per_batch={config.tokens_per_batch}: documents are never split"
        )
    if (config.steps or 0) * config.batches_per_step >= 2**31:
        found.append(
            f"steps={config.steps} x batches_per_step={config.batches_per_step} must be below 2**31"
        )
    if split.drafters >= 1 and config.batches_per_step % split.drafters:
        found.append(
            f"batches_per_step={config.batches_per_step} must be a multiple of "
            f"split.drafters={split.drafters}: each drafter rank takes the same number"
        )
    if split.colocated and split.targets != split.drafters:
        found.append(
            f"split.colocated=true needs split.targets={split.targets} equal to "
            f"split.drafters={split.drafters}: every rank does both"
        )
    if drafter.sliding_layers > drafter.num_layers:
        found.append(
            f"drafter.sliding_layers={drafter.sliding_layers} must not exceed "
            f"drafter.num_layers={drafter.num_layers}"
        )
    return found + _list_problems(config)


def _list_problems(config: Config) -> list[str]:
    found = []
    steps = config.profile.steps
    if steps is not None and (len(steps) != 2 or not 0 <= steps[0] < steps[1]):
        found.append(f"profile.steps={steps} must be [first, end) with 0 <= first < end")
    elif steps is not None and config.steps is not None and steps[0] >= config.steps:
        found.append(f"profile.steps={steps} must begin before steps={config.steps}")
    layers = config.target.capture_layers
    if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
        found.append(f"target.capture_layers={layers} must be ascending, distinct and >= 0")
    return found


def _place_problems(config: Config) -> list[str]:
    """Where a run would write; and that no setting, all of which are written down, is a secret."""
    found = []
    name = Path(config.name)
    plain = config.name.isprintable() and name.parts and not name.is_absolute()
    if not plain or ".." in name.parts or any(len(os.fsencode(p)) > 200 for p in name.parts):
        found.append(
            f"name={config.name!r} must be a plain name, 200 bytes at most: it becomes a folder "
            "in outputs/"
        )
    folder = Path(config.output_dir).resolve()
    if Path.cwd().is_relative_to(folder):
        found.append(
            f"output_dir={config.output_dir!r} must be a folder of the run's own, not {folder}, "
            "which holds the working directory"
        )
    if config.resume == "none":
        for key in (
            "data.cache_dir",
            "data.path",
            "data.heldout",
            "target.path",
            "drafter.init_from",
        ):
            value = attrgetter(key)(config)
            if value is not None and Path(value).resolve().is_relative_to(folder):
                found.append(
                    f"{key}={value} must not lie in output_dir={config.output_dir}, which "
                    "resume=none moves aside"
                )
    for key in setting_keys(Config):
        value = attrgetter(key)(config)
        if isinstance(value, str) and redact(value) != value:
            found.append(_credential(f"{key}={value}"))
    return found


def _credential(text: str) -> str:
    return (
        f"{redact(text)} holds a credential, and settings are written to many places; "
        "put it into the environment (HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...)"
    )


def parse(tree: DictConfig) -> Config:
    """Composed tree -> checked settings.

    Raises:
        ConfigError: an unknown key (also with `+`), a missing value, a wrong type, or broken rules.
    """
    config = _typed(Config, tree)
    if found := problems(config):
        raise ConfigError("\n".join(found))
    return config


def saved_settings(run: Path) -> Config:
    """The settings in a run's directory.

    Raises:
        ConfigError: there are none, or they are damaged.
    """
    file = run / "config.yaml"
    try:
        return parse(cast(DictConfig, OmegaConf.load(file)))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"run={run}: {file} cannot be read: {error}") from error


def command_line(schema: type[Options], arguments: list[str]) -> Options:
    """`key=value` arguments of a small command -> an instance of its dataclass; lists stand between commas.

    Raises:
        ConfigError: an argument without value, an unknown key, one given twice, or a wrong type.
        SystemExit: `--help` has been answered.
    """
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(usage(schema))
        raise SystemExit(0)
    if bare := [argument for argument in arguments if "=" not in argument]:
        raise ConfigError(
            f"{bare[0]}: arguments are key=value; keys: {', '.join(setting_keys(schema))}"
        )
    lists = {k for k, kind in schema.__annotations__.items() if str(kind).startswith("list")}
    given: dict[str, list[str]] = {}
    for key, _, value in (argument.partition("=") for argument in arguments):
        given.setdefault(key, []).append(value)
    for key, values in given.items():
        if len(values) > 1:
            hint = f"; several values: {key}={','.join(values)}" if key in lists else ""
            raise ConfigError(f"{key} is given {len(values)} times: give it once{hint}")
    tree = OmegaConf.from_dotlist([f"{key}={v}" for key, (v,) in given.items() if key not in lists])
    for key in given.keys() & lists:
        (value,) = given[key]
        tree[key] = value.split(",") if value else []
    return _typed(schema, tree)


def _typed(schema: type[Options], tree: DictConfig) -> Options:
    try:
        plain = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
        if unknown := _unknown_keys(plain, schema, prefix=""):
            raise ConfigError("\n".join(unknown))
        merged = OmegaConf.merge(OmegaConf.structured(schema), plain)
        return cast(Options, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


def setting_keys(schema: Any) -> Iterator[str]:
    """Every dotted key of a dataclass of settings."""
    for field in fields(schema):
        if is_dataclass(field.type):
            yield from (f"{field.name}.{key}" for key in setting_keys(field.type))
        else:
            yield field.name


def _unknown_keys(plain: dict[str, Any], schema: Any, *, prefix: str) -> list[str]:
    known = {f.name: f.type for f in fields(schema)}
    found = []
    for key, value in plain.items():
        if key in known:
            if isinstance(value, dict) and is_dataclass(known[key]):
                found += _unknown_keys(value, known[key], prefix=f"{prefix}{key}.")
            continue
        path = key
        while isinstance(value, dict) and len(value) == 1:
            ((inner, value),) = value.items()
            path = f"{path}.{inner}"
        keys = list(setting_keys(schema))
        leaf = path.rpartition(".")[2]
        near = [known_key for known_key in keys if known_key.rpartition(".")[2] == leaf]
        near = near or difflib.get_close_matches(path, keys, n=1)
        hint = f"; did you mean {' or '.join(prefix + one for one in near)}?" if near else ""
        found.append(f"{redact(f'{prefix}{path}={value}')} is no setting{hint}")
    return found


def override_problems(overrides: list[str]) -> list[str]:
    """What is wrong with `key=value` words, found before Hydra sees, and echoes, them.

    Hydra's advice on an unknown key is to add it with `+`, which `parse` would refuse. Groups,
    and keys of Hydra's own, are left to it.
    """
    found = []
    for word in overrides:
        if redact(word) != word:
            found.append(_credential(word.lstrip("+~")))
            continue
        key, equals, value = word.lstrip("+~").partition("=")
        if (key, value) == ("hydra/sweeper", "optuna") and not _has_optuna():
            found.append(f"{word} is not installed: pip install -e '.[optuna]'")
        parts = key.strip().split(".")
        if not equals or parts[0] in ("hydra", "experiment", "sweep") or set("/@") & set(key):
            continue
        tree: Any = value
        for part in reversed(parts):
            tree = {part: tree}
        found += _unknown_keys(tree, Config, prefix="")
    return found


def _has_optuna() -> bool:
    """Whether Hydra's plugin is installed; Hydra itself would only say which sweepers it has."""
    plugins = find_spec("hydra_plugins")  # no package of that name without any plugin
    return plugins is not None and find_spec("hydra_plugins.hydra_optuna_sweeper") is not None


def resolved(config: Config) -> dict[str, Any]:
    """The settings as plain values, for config.yaml and wandb. An enum's name is its value."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    return cast(dict[str, Any], plain)
