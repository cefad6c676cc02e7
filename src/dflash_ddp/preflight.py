"""What rank 0 checks before anything slow: target, drafter, tokenizer and output folder, without loading weights."""

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
from safetensors import safe_open
from transformers import AutoTokenizer

from dflash_ddp.checkpoint import (
    complete_checkpoints,
    first_whole,
    read_state,
    remove_leftovers,
    step_folder,
)
from dflash_ddp.config import Config, ConfigError, Device, Dtype
from dflash_ddp.drafter.model import Drafter, DrafterShape
from dflash_ddp.native import CONFIG_FILE, WEIGHTS_FILE, drafter_shape, native_differences
from dflash_ddp.settings import resolved
from dflash_ddp.target.tables import (
    TargetSpec,
    check_capture_layers,
    choose_mask_token,
    default_capture_layers,
    read_spec,
)
from dflash_ddp.upload import check_address

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
    if device_type(config.device) == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu")
    try:
        spec = read_spec(
            config.target.path, config.target.revision, config.target.trust_remote_code
        )
        layers = config.target.capture_layers or default_capture_layers(
            spec.num_layers, config.drafter.num_layers
        )
        check_capture_layers(layers, spec.num_layers)
        mask_token_id = choose_mask_token(
            spec, load_tokenizer(config), config.drafter.mask_token_id
        )
        shape = drafter_shape(
            config.drafter, spec, num_capture_layers=len(layers), mask_token_id=mask_token_id
        )
        if config.drafter.init_from is not None:
            check_start(Path(config.drafter.init_from), shape, spec, layers)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    if config.checkpoint.upload is not None:
        check_address(config.checkpoint.upload)
    folder = Path(config.output_dir)
    checkpoint = _find_checkpoint(config, folder)
    if checkpoint is None:
        return Preflight(layers, mask_token_id, None, 0, 0)
    state = read_state(checkpoint)
    logger.info("going on from %s", checkpoint)
    return Preflight(layers, mask_token_id, str(checkpoint), state.step, state.tokens)


def check_start(
    folder: Path, shape: DrafterShape, spec: TargetSpec, capture_layers: list[int]
) -> None:
    """Refuse weights to start from that are another drafter's.

    Raises:
        ConfigError: names every difference in shape, meaning and tensors.
    """
    if not all((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        raise ConfigError(
            f"drafter.init_from={folder} is no native drafter: it needs {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}. Download a published one into a folder first"
        )
    found = native_differences(folder, shape, spec, capture_layers)
    with torch.device("meta"):
        wanted = {name: list(w.shape) for name, w in Drafter(shape).state_dict().items()}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            found.append(f"{name}: {stored.get(name)} there, {wanted.get(name)} here")
    if found:
        lines = "\n  ".join(found)
        raise ConfigError(f"drafter.init_from={folder} is another drafter:\n  {lines}")


def _find_checkpoint(config: Config, folder: Path) -> Path | None:
    """Where to go on from, per `resume`."""
    checkpoints = folder / "checkpoints"
    if config.resume == "none":
        return None
    if config.resume == "auto":
        if checkpoints.is_dir():
            remove_leftovers(checkpoints)
        return first_whole(complete_checkpoints(checkpoints)[::-1])
    given = Path(config.resume)
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


def claim_folder(config: Config, reports: dict[str, dict[str, Any]]) -> None:
    """Take the run's folder, once all is checked: a run that is refused has changed nothing in it.

    With resume=none an earlier run is moved aside, never mixed. Writes config.yaml (every setting
    as resolved), env.json (with what this ran) and the data reports.
    """
    folder = Path(config.output_dir)
    if config.resume == "none" and (folder / "config.yaml").exists():
        names = (folder.with_name(f"{folder.name}.{n}") for n in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        shutil.move(folder, aside)
        logger.info("resume=none: the earlier run is now in %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in reports.items():
        file = folder / f"data_report_{name}.json"
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    text = yaml.safe_dump(resolved(config), sort_keys=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    environment = {"argv": sys.argv, "python": sys.version, "torch": torch.__version__, "gpu": gpu}
    (folder / "env.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
