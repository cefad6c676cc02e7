"""The frozen target: a decoder that ends where the drafter stops reading.

In: a folder or hub id in transformers format. Out: its base model on the device, without head and
final norm, holding only the decoder layers up to the last captured one: what it returns is the raw
output of that layer. Layers above are never read from disk.

Invariants: nothing is trained, cached or freshly initialised; rows are causal with padding on the
right, so no attention mask is ever needed.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dflash_ddp.target.tables import read_config

logger = logging.getLogger(__name__)

# Not "flash" anything: transformers takes such a name for a kernel to look up.
CAUSAL_ROWS = "causal_rows"


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention of whole rows: query `[R, A, L, D]`, key, value `[R, G, L, D]`, no mask.

    Out is `[R, L, A, D]`. Before it builds a mask, transformers asks the GPU whether rows are
    packed: a wait in every forward. For an attention function that it does not know it builds none
    and asks nothing. It passes more keywords than we read, hence `**_`.
    """
    if attention_mask is not None:
        raise ValueError("context features are captured without an attention mask")
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(CAUSAL_ROWS, causal_attention)


def load_target(
    path: str,
    revision: str | None,
    *,
    capture_layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a frozen target straight onto `device`; it is never in host memory as a whole.

    The highest of `capture_layers` is the last layer that is read. `attention` is "sdpa" (PyTorch's
    fused causal attention) or another name of transformers.

    Raises:
        ValueError: a quantised or incomplete checkpoint, an unknown layout.
    """
    config = read_config(path, revision, trust_remote_code)
    text = config.get_text_config(decoder=True)
    num_layers = _cut(text, capture_layers)
    # Unread tensors are skipped on purpose: transformers need not list them.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model, report = AutoModel.from_pretrained(
        path,
        config=text,
        revision=revision,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    transformers_logging.set_verbosity(verbosity)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"target.path={path!r}: the files lack {len(missing)} tensors, which would be random: "
            f"{', '.join(missing[:5])}. Complete the download, or name the right checkpoint."
        )
    decoder_layers(model)  # or this kind of target is refused
    _freeze(model)
    logger.info("target %s: its first %d layers, %s, on %s", path, num_layers, dtype, device)
    return model


def random_target(
    config: PretrainedConfig,
    *,
    capture_layers: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """A frozen target with random weights, made on `device`, equal wherever the seed is.

    For measuring the speed of a target whose files are not at hand; what it says is noise.
    """
    text = config.get_text_config(decoder=True)
    num_layers = _cut(text, capture_layers)
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng([torch.device(device)] if cuda else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModel.from_config(text, dtype=dtype, attn_implementation=attention)
    decoder_layers(model)
    _freeze(model)
    logger.warning("target with random weights: %d layers, %s, on %s", num_layers, dtype, device)
    return model


def _cut(text: PretrainedConfig, capture_layers: Sequence[int]) -> int:
    """End the config at the last captured layer; the number of layers left."""
    text.num_hidden_layers = num_layers = max(capture_layers) + 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return num_layers


def _freeze(model: PreTrainedModel) -> None:
    """Take off the final norm, stop gradients and caches, and choose the attention."""
    model.norm = nn.Identity()
    model.config.use_cache = False
    model.eval().requires_grad_(False)
    types = set(getattr(model.config, "layer_types", None) or ())
    windowed = getattr(model.config, "sliding_window", None) is not None
    if model.config._attn_implementation == "sdpa":
        if windowed or not types <= {"full_attention", "linear_attention"}:
            logger.info("windowed layers: transformers builds their masks, one wait per forward")
        else:
            model.set_attn_implementation(CAUSAL_ROWS)
    if "linear_attention" in types:
        logger.info("linear attention: %s", "; ".join(_describe_kernels()))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a base model; ValueError if they are not where they are expected."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(model, "norm"):
        raise ValueError(
            f"{type(model).__name__} does not keep decoder layers in .layers before a final .norm; "
            "targets of this kind are not supported."
        )
    return layers


def _describe_kernels() -> Iterator[str]:
    """One phrase for each kernel of linear attention: what transformers runs, what to install."""
    for what, module, package, otherwise in (
        ("delta rule", "fla.ops.gated_delta_rule", "flash-linear-attention", "slow"),
        ("convolution", "causal_conv1d", "causal-conv1d", "slow unless layers are compiled"),
    ):
        try:
            importlib.import_module(module)
            yield f"{what} by {package}"
        except (ImportError, OSError, RuntimeError) as error:
            yield f"{what} in PyTorch, {otherwise} (install {package}: {error})"


@contextmanager
def transformers_forward(model: PreTrainedModel) -> Iterator[None]:
    """Within: transformers' own attention and uncompiled layers; our changes return afterwards.

    The cut and the missing final norm stay, so the last of `hidden_states` is raw like the others.
    """
    compiled = {layer: layer.__dict__.pop("forward", None) for layer in decoder_layers(model)}
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if attention == CAUSAL_ROWS else attention)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        for layer, forward in compiled.items():
            if forward is not None:
                layer.forward = forward
