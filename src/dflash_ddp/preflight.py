"""What rank 0 checks before anything slow: target, drafter, tokenizer and output folder, without loading weights."""

import fcntl
import json
import logging
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import yaml
from huggingface_hub import constants as hub_constants
from transformers import AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_ddp.checkpoint import complete_checkpoints, read_state, remove_leftovers, step_folder
from dflash_ddp.config import Config, ConfigError, Device, Dtype, TargetConfig
from dflash_ddp.drafter.attention import check_dense_size
from dflash_ddp.export import drafter_shape
from dflash_ddp.redaction import redact
from dflash_ddp.settings import resolved
from dflash_ddp.target.tables import (
    check_capture_layers,
    check_files,
    choose_mask_token,
    default_capture_layers,
    read_spec,
)

logger = logging.getLogger(__name__)


def device_type(device: Device) -> str:
    """`cuda` or `cpu`; auto takes GPUs if there are any."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def torch_dtype(dtype: Dtype, device: str) -> torch.dtype:
    """The compute dtype on a device."""
    if dtype is Dtype.auto:
        return torch.bfloat16 if device == "cuda" else torch.float32
    return getattr(torch, dtype.value)


@dataclass(frozen=True, slots=True)
class Preflight:
    """What rank 0 found out; published to all ranks as JSON.

    Attributes:
        capture_layers: layers read, ascending.
        mask_token_id: row that fills the blocks.
        checkpoint: folder to go on from, or None.
        first_step: optimizer steps that are complete.
        tokens: tokens trained on so far.
    """

    capture_layers: list[int]
    mask_token_id: int
    checkpoint: str | None
    first_step: int
    tokens: int


def use_cache_without_hub() -> None:
    """Where the hub's name does not resolve, look into the local cache alone.

    The hub's client would try each file for half a minute before it says so.
    """
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return  # then the proxy resolves names
    try:
        socket.getaddrinfo(urlparse(hub_constants.ENDPOINT).hostname, 443)
    except OSError:
        hub_constants.HF_HUB_OFFLINE = True


def load_tokenizer(config: Config) -> Any:
    """The target's tokenizer with its chat template.

    Raises:
        ConfigError: there is none, or it has no template.
    """
    target = config.target
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.path={target.path}: no tokenizer: {error}") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"target.path={target.path}: the tokenizer has no chat template")
    return tokenizer


def preflight(config: Config) -> Preflight:
    """Check target, drafter and output folder against each other, without loading weights.

    Raises:
        ConfigError: what does not fit, with key, value and rule.
    """
    device = device_type(config.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu")
    check_attention(config.target)
    try:
        if device == "cpu":
            num_queries = config.drafter.num_anchors * config.drafter.block_size
            check_dense_size(num_queries, config.tokens_per_batch + num_queries)
        spec = read_spec(
            config.target.path, config.target.revision, config.target.trust_remote_code
        )
        check_files(config.target.path, spec)
        if config.data.max_length > spec.max_position_embeddings:
            raise ConfigError(
                f"data.max_length={config.data.max_length} must not exceed the target's "
                f"max_position_embeddings={spec.max_position_embeddings}: it knows no later places"
            )
        layers = config.target.capture_layers or default_capture_layers(
            spec.num_layers, config.drafter.num_layers
        )
        check_capture_layers(layers, spec.num_layers)
        mask_token_id = choose_mask_token(
            spec, load_tokenizer(config), config.drafter.mask_token_id
        )
        drafter_shape(
            config.drafter, spec, num_capture_layers=len(layers), mask_token_id=mask_token_id
        )
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(_with_our_key(error)) from error
    folder = Path(config.output_dir)
    if folder.is_dir():
        check_links(folder)
        hold_folder(folder)
    checkpoint = _find_checkpoint(config, folder)
    if checkpoint is None:
        return Preflight(layers, mask_token_id, None, 0, 0)
    state = read_state(checkpoint)
    logger.info("going on from %s", checkpoint)
    return Preflight(layers, mask_token_id, str(checkpoint), state.step, state.tokens)


def check_attention(target: TargetConfig) -> None:
    """ConfigError if transformers has no such attention, or would fetch code for it unasked."""
    known = sorted({*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager"})
    name = target.attention
    if name not in known and not (target.trust_remote_code and "/" in name):
        raise ConfigError(
            f"target.attention={name} must be one of {', '.join(known)}; kernels from the hub are "
            "code of others, and need target.trust_remote_code=true"
        )


def _with_our_key(error: Exception) -> str:
    """What transformers says, and where to say so."""
    text = str(error)
    if "trust_remote_code" in text:
        return f"{text}\ntarget.trust_remote_code=true runs the code that comes with the target"
    return text


def check_links(folder: Path) -> None:
    """ConfigError if what the run would write goes elsewhere, by a link inside its folder."""
    place = folder.resolve()
    for entry in [*folder.iterdir(), *folder.glob("checkpoints/*")]:
        if entry.is_symlink() and not entry.resolve().is_relative_to(place):
            raise ConfigError(
                f"{entry} is a link to {entry.resolve()}, outside of output_dir={folder}, where "
                "all of the run is written; give output_dir itself the place that you want"
            )


_held: set[int] = set()  # inodes; their locks end with the process


def hold_folder(folder: Path) -> None:
    """Keep other runs out of a folder as long as this process lives.

    Raises:
        ConfigError: a run has it.
    """
    if folder.stat().st_ino in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.add(folder.stat().st_ino)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"output_dir={folder} is in use by another run; give this one another name"
        ) from None
    except OSError as error:  # some network file systems lock no folders
        logger.warning("%s cannot be locked (%s): start no second run in it", folder, error)


def _find_checkpoint(config: Config, folder: Path) -> Path | None:
    """Where to go on from, per `resume`."""
    checkpoints = folder / "checkpoints"
    if config.resume == "none":
        return None
    if config.resume == "auto":
        if checkpoints.is_dir():
            remove_leftovers(checkpoints)
        found = complete_checkpoints(checkpoints)
        return found[-1] if found else None
    given = Path(config.resume)
    if not given.is_dir() or not any(given.iterdir()):
        what = "is an empty folder" if given.is_dir() else "does not exist"
        raise ConfigError(f"resume={given} {what}; give auto, none or a checkpoint's folder")
    inside = complete_checkpoints(given) or complete_checkpoints(given / "checkpoints")
    if inside:
        raise ConfigError(f"resume={given} holds checkpoints; give one of them, as {inside[-1]}")
    newer = [
        p
        for p in complete_checkpoints(checkpoints)
        if p > step_folder(checkpoints, read_state(given).step)
    ]
    if newer:  # the next resume=auto would take them for this run's
        raise ConfigError(
            f"resume={given}, but {newer[-1]} is of later steps, which would be made again; give "
            "the run another name, or delete the newer checkpoints"
        )
    return given


def claim_folder(config: Config, data_report: dict[str, Any]) -> None:
    """Take the run's folder, once all is checked: a run that is refused has changed nothing in it.

    With resume=none an earlier run is moved aside, never mixed. Writes config.yaml (every setting
    as resolved), env.json (with what this ran) and data_report.json.
    """
    folder = Path(config.output_dir)
    if folder.is_dir():
        hold_folder(folder)
    if config.resume == "none" and (folder / "config.yaml").exists():
        names = (folder.with_name(f"{folder.name}.{n}") for n in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        shutil.move(folder, aside)
        logger.info("resume=none: the earlier run is now in %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    hold_folder(folder)
    text = json.dumps(data_report, indent=2) + "\n"
    (folder / "data_report.json").write_text(text, encoding="utf-8")
    text = yaml.safe_dump(resolved(config), sort_keys=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    argv = [redact(word) for word in sys.argv]
    environment = {"argv": argv, "python": sys.version, "torch": torch.__version__, "gpu": gpu}
    (folder / "env.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
