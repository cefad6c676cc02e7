"""The drafter in the format of vllm-project/speculators 0.9: other configuration, same weights under the same names.

Embedding, head and final norm are the target's; its class reads them from `verifier.name_or_path` when it loads. What
that class computes differently from a native drafter is refused; one difference is left, in its training layout alone:
a sliding layer of width W sees W tokens before the anchor from every slot, while servers count W from the slot itself.
"""

import json
from pathlib import Path
from typing import Any

import torch

from dflash_ddp.config import ConfigError
from dflash_ddp.drafter.model import FULL, SLIDING, DrafterShape
from dflash_ddp.native import weight_shapes

VERSION = "0.9.0"
_ONLY_NATIVE = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")


def problems(shape: DrafterShape, capture_layers: list[int], num_target_layers: int) -> list[str]:
    """What the format cannot say of a drafter, one text each."""
    found, kinds = [], set(shape.layer_types)
    if shape.is_causal and FULL in kinds:
        found.append("is_causal=true on a full layer: its full layers are two-way inside a block")
    if shape.sliding_window is not None and shape.sliding_window < shape.block_size:
        found.append(
            f"sliding_window={shape.sliding_window} below block_size={shape.block_size}: it does "
            "not apply the window inside a block"
        )
    if max(capture_layers) + 1 == num_target_layers:
        found.append(f"target layer {max(capture_layers)}: it never reads the last layer")
    return found


def speculators_config(
    native: dict[str, Any], shape: DrafterShape, *, target: str, architectures: list[str]
) -> dict[str, Any]:
    """The contents of config.json, from those of the native one.

    Args:
        native: the native configuration.
        shape: the drafter's.
        target: folder or hub name from which the target's tables are read.
        architectures: the target's, from its config.json.
    """
    two_way = SLIDING in shape.layer_types and shape.is_causal is False
    layers = {key: value for key, value in native.items() if key not in _ONLY_NATIVE}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}
            ],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": native["vocab_size"],
        "target_hidden_size": shape.hidden_size,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        # Counted from 1 there: 0 is the embedding.
        "aux_hidden_state_layer_ids": [i + 1 for i in native["dflash_config"]["target_layer_ids"]],
        "sliding_window_non_causal": two_way,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": native["dtype"],
    }


def check(folder: Path) -> bool:
    """Compare a folder with what speculators' class would save; False if it is not installed.

    Raises:
        ConfigError: its class would want other weights, or other shapes.
    """
    try:
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    except ImportError:
        return False
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    with torch.device("meta"):  # names and shapes; the target's tables would fill the memory
        model = DFlashDraftModel(config)
    ignored = set(model._keys_to_ignore_on_save)
    wanted = {name: list(w.shape) for name, w in model.state_dict().items() if name not in ignored}
    stored = weight_shapes(folder)
    if wanted != stored:
        odd = sorted(
            name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name)
        )
        raise ConfigError(f"speculators' class would not load {json.dumps(odd)}")
    return True
