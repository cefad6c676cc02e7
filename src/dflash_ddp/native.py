"""The native DFlash folder: `config.json` and `model.safetensors`, as z-lab's class and the servers read them.

Weights carry z-lab's names, without prefix, without the target's embedding and head. The configuration writes every
value that a reader might default: both forms of the rope base, the block size at both places, explicit layers.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_ddp.config import ConfigError, DrafterConfig
from dflash_ddp.drafter.model import FULL, SLIDING, Drafter, DrafterShape
from dflash_ddp.target.tables import TargetSpec

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def drafter_shape(
    config: DrafterConfig, spec: TargetSpec, *, num_capture_layers: int, mask_token_id: int
) -> DrafterShape:
    """The drafter for a target: sizes that the settings leave open follow the target.

    Raises:
        ValueError: query heads are no multiple of key/value heads, or a head's width is odd.
    """
    heads = config.num_attention_heads or spec.num_attention_heads
    key_value_heads = config.num_key_value_heads or spec.num_key_value_heads
    head_dim = config.head_dim or spec.head_dim
    if heads % key_value_heads:
        raise ValueError(
            f"drafter.num_attention_heads={heads} must be a multiple of "
            f"drafter.num_key_value_heads={key_value_heads}"
        )
    if head_dim % 2:
        raise ValueError(f"drafter.head_dim={head_dim} must be even: rotary embedding takes pairs")
    num_sliding = config.sliding_layers
    return DrafterShape(
        hidden_size=spec.hidden_size,
        intermediate_size=config.intermediate_size or spec.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        num_capture_layers=num_capture_layers,
        layer_types=(SLIDING,) * num_sliding + (FULL,) * (config.num_layers - num_sliding),
        sliding_window=config.sliding_window if num_sliding else None,
        is_causal=config.is_causal,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        initializer_range=spec.initializer_range,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
    )


def native_config(
    shape: DrafterShape, spec: TargetSpec, capture_layers: list[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The contents of config.json."""
    num_layers = len(shape.layer_types)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(capture_layers),
        },
        "num_target_layers": spec.num_layers,
        "num_hidden_layers": num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
        "max_window_layers": num_layers,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": spec.table_rows,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
        "dtype": str(dtype).removeprefix("torch."),
        "initializer_range": shape.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_cache": True,
    }
    if shape.is_causal is not None:  # absent means: causal on sliding layers only
        config["is_causal"] = shape.is_causal
    return config


def save_native(
    folder: Path, weights: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write both files into an existing folder.

    Args:
        folder: where to.
        weights: the drafter's `state_dict()`, on any device.
        config: from `native_config`.
        dtype: of the stored weights.
    """
    stored = {name: w.detach().to("cpu", dtype).contiguous() for name, w in weights.items()}
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors lets only the owner read; servers must too
    write_config(folder, config)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_shape(folder: Path) -> DrafterShape:
    """The shape that a native folder states.

    Raises:
        ValueError: a field that this reader needs is missing; it never guesses.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    dflash = config.get("dflash_config", {})
    try:
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
        layer_types = config.get("layer_types") or [FULL] * config["num_hidden_layers"]
        return DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_capture_layers=len(dflash["target_layer_ids"]),
            layer_types=tuple(layer_types),
            sliding_window=config.get("sliding_window"),
            is_causal=config.get("is_causal"),
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=config["rms_norm_eps"],
            initializer_range=config["initializer_range"],
            block_size=dflash.get("block_size") or config["block_size"],
            mask_token_id=dflash["mask_token_id"],
        )
    except KeyError as missing:
        raise ValueError(f"{folder / CONFIG_FILE} has no {missing}") from None


# Settings of a native folder that change what a drafter computes, and the value that ours has.
_FIXED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "sample_from_anchor": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "conv_kernel_size": None,
    "selector_rank": None,
    "projector_type": "dflash",
    "markov_rank": None,
}


def native_differences(
    folder: Path, shape: DrafterShape, spec: TargetSpec, capture_layers: list[int]
) -> list[str]:
    """Where a native folder's drafter is not the one described, in shape or meaning, one text each.

    Masks are compared by what they let a slot see, not by how they are written down.

    Raises:
        ValueError: see `load_shape`.
    """
    config, theirs = json.loads((folder / CONFIG_FILE).read_text("utf-8")), load_shape(folder)
    inner = config.get("dflash_config", {})
    pairs: dict[str, tuple[Any, Any]] = {
        key: (value, getattr(shape, key))
        for key, value in asdict(theirs).items()
        if key not in ("initializer_range", "is_causal", "sliding_window")
    }
    for i, kinds in enumerate(zip(theirs.layer_types, shape.layer_types, strict=False)):
        pairs[f"mask of layer {i}"] = (theirs.mask_rule(kinds[0]), shape.mask_rule(kinds[1]))
    pairs["target_layer_ids"] = (inner["target_layer_ids"], list(capture_layers))
    pairs["num_target_layers"] = (config.get("num_target_layers"), spec.num_layers)
    pairs["vocab_size"] = (config.get("vocab_size"), spec.table_rows)
    for key, ours in _FIXED.items():
        pairs[key] = (inner.get(key, config.get(key, ours)), ours)
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    pairs["rope_type"] = (rope_type, "default")
    return [
        f"{key}: {theirs} there, {ours} here"
        for key, (theirs, ours) in pairs.items()
        if theirs != ours
    ]


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of the stored tensors by name, from the file's header."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def weight_differences(folder: Path, shape: DrafterShape) -> list[str]:
    """Tensors of a native folder that a drafter of this shape lacks, or has otherwise, one text each."""
    there = weight_shapes(folder)
    here = {name: list(w.shape) for name, w in Drafter.empty(shape, "meta").state_dict().items()}
    return [
        f"{name}: {there.get(name)} there, {here.get(name)} here"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def load_capture_layers(folder: Path) -> list[int]:
    """The target's layers that a native folder's drafter reads, 0-based."""
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config["dflash_config"]["target_layer_ids"]


def newest_drafter(run: Path) -> Path:
    """A run's exported drafter; of a run that has not ended, that of its newest checkpoint.

    Raises:
        ConfigError: it has neither.
    """
    folders = [run / "export", *sorted((run / "checkpoints").glob("step_*"), reverse=True)]
    found = next((folder for folder in folders if (folder / WEIGHTS_FILE).is_file()), None)
    if found is None:
        raise ConfigError(f"run={run} has neither export/ nor a checkpoint")
    return found


def load_native(folder: Path, device: torch.device) -> Drafter:
    """The drafter of a native folder, as fp32 masters; every tensor must be there and no other."""
    model = Drafter.empty(load_shape(folder))
    load_weights(model, folder)
    return model.to(device)


def load_weights(model: Drafter, folder: Path) -> None:
    """A native folder's weights into a drafter of its shape.

    Raises:
        RuntimeError: a tensor is missing, left over or of another shape; torch names all.
    """
    weights = load_file(folder / WEIGHTS_FILE)
    model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=True)
