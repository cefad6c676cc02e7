"""What rank 0 checks before anything slow: target, drafter, tokenizer and output folder, without loading weights."""

import hashlib
import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from huggingface_hub import constants as hub_constants
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_ddp.checkpoint import (
    complete_checkpoints,
    first_whole,
    read_state,
    step_folder,
)
from dflash_ddp.config import Config, ConfigError, Device, Dtype, TargetConfig
from dflash_ddp.drafter.attention import check_dense_size
from dflash_ddp.drafter.model import DrafterShape
from dflash_ddp.folder import check_links, check_writable, hold_folder
from dflash_ddp.native import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    drafter_shape,
    native_differences,
    weight_differences,
)
from dflash_ddp.target.tables import (
    TargetSpec,
    check_files,
    choose_capture_layers,
    choose_mask_token,
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
        chat_template: hash of the target's.
        checkpoint: folder to go on from, or None.
        first_step: optimizer steps that are complete.
        tokens: tokens trained on so far.
    """

    capture_layers: list[int]
    mask_token_id: int
    chat_template: str
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
    check_device(config)
    check_attention(config.target)
    try:
        spec = read_spec(
            config.target.path, config.target.revision, config.target.trust_remote_code
        )
        if not config.target.random_weights:
            check_files(config.target.path, config.target.revision, spec)
        if config.data.max_length > spec.max_position_embeddings:
            raise ConfigError(
                f"data.max_length={config.data.max_length} must not exceed the target's "
                f"max_position_embeddings={spec.max_position_embeddings}: it knows no later places"
            )
        layers = choose_capture_layers(
            config.target.capture_layers, spec.num_layers, config.drafter.num_layers
        )
        tokenizer = load_tokenizer(config)
        mask_token_id = choose_mask_token(spec, tokenizer, config.drafter.mask_token_id)
        shape = drafter_shape(
            config.drafter, spec, num_capture_layers=len(layers), mask_token_id=mask_token_id
        )
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(_with_our_key(error)) from error
    if config.checkpoint.upload is not None:
        check_address(config.checkpoint.upload)
    folder = Path(config.output_dir)
    check_writable(folder, "output_dir")
    check_writable(Path(config.data.cache_dir), "data.cache_dir")
    if folder.is_dir():
        check_links(folder)
        hold_folder(folder)
    checkpoint = _find_checkpoint(config, folder)
    if config.drafter.init_from is not None and checkpoint is None:
        check_start(Path(config.drafter.init_from), shape, spec, layers)
    template = str(tokenizer.chat_template).encode()
    found = Preflight(
        capture_layers=layers,
        mask_token_id=mask_token_id,
        chat_template=hashlib.blake2b(template, digest_size=8).hexdigest(),
        checkpoint=None,
        first_step=0,
        tokens=0,
    )
    if checkpoint is None:
        return found
    state = read_state(checkpoint)
    logger.info("going on from %s", checkpoint)
    return replace(found, checkpoint=str(checkpoint), first_step=state.step, tokens=state.tokens)


def check_device(config: Config) -> None:
    """ConfigError without the GPU that is asked for, or with attention too large for a CPU."""
    device = device_type(config.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu")
    if device == "cpu":
        num_queries = config.drafter.num_anchors * config.drafter.block_size
        try:
            check_dense_size(num_queries, config.tokens_per_batch + num_queries)
        except ValueError as error:
            raise ConfigError(str(error)) from None


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
    try:
        found = native_differences(folder, shape, spec, capture_layers)
        found += weight_differences(folder, shape)
    except (ValueError, OSError, SafetensorError) as error:
        raise ConfigError(f"drafter.init_from={folder}: {error}") from error
    if found:
        lines = "\n  ".join(found)
        raise ConfigError(f"drafter.init_from={folder} is another drafter:\n  {lines}")


def _find_checkpoint(config: Config, folder: Path) -> Path | None:
    """Where to go on from, per `resume`."""
    checkpoints = folder / "checkpoints"
    if config.resume == "none":
        return None
    if config.resume == "auto":
        return first_whole(complete_checkpoints(checkpoints)[::-1])
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
