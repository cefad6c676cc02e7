"""A run's drafter as a folder of its own, with a model card; nothing is written that would not load.

python -m dflash_ddp.export run=outputs/mine out=DIR [format=native|speculators] [drafter=<checkpoint>]
"""

import filecmp
import json
import shutil
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dflash_ddp.config import ConfigError
from dflash_ddp.log import USER_ERROR, tell
from dflash_ddp.metrics_file import heldout_row
from dflash_ddp.model_card import model_card
from dflash_ddp.native import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_capture_layers,
    load_shape,
    newest_drafter,
    weight_differences,
    write_config,
)
from dflash_ddp.settings import command_line, saved_settings
from dflash_ddp.speculators_format import check, problems, speculators_config
from dflash_ddp.target.tables import read_config


class Format(Enum):
    """Of an export."""

    native = "native"
    speculators = "speculators"


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """What to export."""

    run: str = ""
    """Directory of a run."""
    out: str = ""
    """Folder to write; must not exist."""
    format: Format = Format.native
    """native (z-lab's, for vLLM and SGLang) | speculators (0.9, for vLLM)."""
    drafter: str | None = None
    """Native folder to export, such as a checkpoint of the run; null: the run's own export."""


def check_mask_token(config: dict[str, Any]) -> None:
    """Refuse a mask token that has no row, pads, starts or ends.

    Raises:
        ConfigError: names the token and the rule.
    """
    mask = config["dflash_config"]["mask_token_id"]
    named = [config.get(f"{kind}_token_id") for kind in ("pad", "bos", "eos")]
    taken = {i for value in named for i in (value if isinstance(value, list) else [value])}
    if not 0 <= mask < config["vocab_size"] or mask in taken:
        raise ConfigError(
            f"mask_token_id={mask} must be a row of the target's table, 0..{config['vocab_size'] - 1}"
            f", and none of the pad, start and end tokens {sorted(i for i in taken if i is not None)}"
        )


def step_of(run: Path, source: Path) -> int | None:
    """The step behind a native folder's weights: that of the run's checkpoint that holds the same."""
    for checkpoint in sorted((run / "checkpoints").glob("step_*"), reverse=True):
        same = (source / WEIGHTS_FILE, checkpoint / WEIGHTS_FILE)
        if same[1].is_file() and filecmp.cmp(*same, shallow=False):
            return int(checkpoint.name.removeprefix("step_"))
    return None


def export(options: ExportConfig) -> Path:
    """Write a run's drafter and its card into `out`, checked; the folder.

    Raises:
        ConfigError: `out` exists, the run has no drafter, or it would not load.
    """
    if not options.run or not options.out:
        raise ConfigError("give run=<dir> out=<dir>")
    run, out = Path(options.run), Path(options.out)
    if out.exists():
        raise ConfigError(f"out={out} exists; give a new folder")
    source = Path(options.drafter) if options.drafter else newest_drafter(run)
    settings = saved_settings(run)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    shape = load_shape(source)
    check_mask_token(config)
    if odd := weight_differences(source, shape):
        raise ConfigError(f"nothing is exported, {source} would not load:\n  " + "\n  ".join(odd))
    if options.format is Format.speculators:
        found = problems(shape, load_capture_layers(source), config["num_target_layers"])
        if found:
            raise ConfigError("speculators' format cannot say this:\n" + "\n".join(found))
        target = settings.target
        architectures = read_config(target.path, target.revision, False).architectures or []
        config = speculators_config(config, shape, target=target.path, architectures=architectures)
    step = step_of(run, source) or settings.steps or 0
    heldout = heldout_row(run, step)
    card = model_card(settings, shape, step=step, heldout=heldout, form=options.format.value)
    work = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        shutil.copy(source / WEIGHTS_FILE, work)
        write_config(work, config)
        (work / "README.md").write_text(card, encoding="utf-8")
        if options.format is Format.speculators:
            check_speculators(work)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def check_speculators(folder: Path) -> None:
    """Let speculators' class read it, if it is installed.

    Raises:
        ConfigError: it does not take it.
    """
    try:
        if not check(folder):
            sys.stderr.write(
                "dflash_ddp: speculators is not installed: its class has not read this\n"
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"nothing is exported, speculators does not load it: {error}") from error


def main() -> None:
    """Parse the command line, export, say where."""
    try:
        out = export(command_line(ExportConfig, sys.argv[1:]))
    except (ConfigError, OSError) as error:
        tell(error)
        raise SystemExit(USER_ERROR) from None
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    main()
