"""What configs say of a run, put together: the sizes of both roles, what they cost and what they need."""

import copy
from dataclasses import dataclass, replace
from operator import attrgetter

from dflash_ddp import costs
from dflash_ddp.config import TILE, Config, ConfigError
from dflash_ddp.costs import GIB, GPUS, Gpu
from dflash_ddp.drafter.model import DrafterShape
from dflash_ddp.native import drafter_shape
from dflash_ddp.target.sizes import read_sizes
from dflash_ddp.target.tables import (
    TargetSpec,
    choose_capture_layers,
    read_spec,
)

# (setting, multiple it is lowered by): those that change no result come before those that change the training.
LEVERS = {
    "drafter": (
        ("split.depth", 1),
        ("loss.chunk_rows", 256),
        ("drafter.num_anchors", 16),
        ("tokens_per_batch", 128),
    ),
    "target": (("target.row_tokens", 128), ("tokens_per_batch", 128)),
    "colocated": (
        ("loss.chunk_rows", 256),
        ("target.row_tokens", 128),
        ("drafter.num_anchors", 16),
        ("tokens_per_batch", 128),
    ),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What configs say: settings, target, drafter, and the layers that are read."""

    config: Config
    spec: TargetSpec
    sizes: costs.TargetSizes
    shape: DrafterShape
    layers: list[int]

    def with_setting(self, key: str, value: int) -> "Facts":
        """The same with one setting changed, on which no size of target or drafter depends."""
        config = copy.deepcopy(self.config)
        group, _, name = key.rpartition(".")
        setattr(attrgetter(group)(config) if group else config, name, value)
        return replace(self, config=config)

    def target_flops(self) -> int:
        """Operations a token of a target."""
        return sum(costs.target_flops(self.sizes, self.config.data.max_length))

    def drafter_flops(self) -> int:
        """Operations of a packed batch of a drafter, forward and backward."""
        return sum(costs.drafter_flops(self.shape, self.config, self.spec.table_rows))

    def target_seconds(self, gpu: Gpu) -> float:
        """Predicted seconds a token of one target rank."""
        return costs.target_seconds(self.sizes, self.config.data.max_length, gpu)

    def drafter_seconds(self, gpu: Gpu) -> float:
        """Predicted seconds a token of one drafter rank."""
        return costs.drafter_seconds(self.shape, self.config, self.spec.table_rows, gpu)

    def fixed_share(self) -> float:
        """Part of a drafter's predicted time that does not depend on the anchors; time is linear in them."""
        gpu = GPUS["h200"]  # of little account in a ratio
        none = self.with_setting("drafter.num_anchors", 0)
        return none.drafter_seconds(gpu) / self.drafter_seconds(gpu)

    def target_memory(self) -> dict[str, int]:
        """Bytes of a target rank by what they are for."""
        return costs.target_memory(self.sizes, self.shape, self.config)

    def drafter_memory(self) -> dict[str, int]:
        """Bytes of a drafter rank by what they are for."""
        return costs.drafter_memory(
            self.shape, self.config, table_rows=self.spec.table_rows, tied=self.spec.tied
        )

    def rank_memory(self, role: str) -> int:
        """Bytes of a "target", "drafter" or "colocated" rank."""
        target, drafter = self.target_memory(), self.drafter_memory()
        if role == "colocated":  # one slot in all
            target["slots"], drafter["slots"] = 0, drafter["slots"] // (self.config.split.depth + 1)
            return sum(target.values()) + sum(drafter.values())
        return sum((target if role == "target" else drafter).values())

    def memory_advice(self, role: str, num_bytes: float) -> list[str]:
        """What to lower, and to what, so that a rank of this role needs so many bytes less: the mildest first.

        Memory is linear in each lever.
        """
        advice, needed = [], self.rank_memory(role)
        for key, multiple in LEVERS[role]:
            value = attrgetter(key)(self.config)
            least = {"split.depth": 0, "loss.chunk_rows": 256, "drafter.num_anchors": 16}.get(
                key, -(-self.config.data.max_length // TILE) * TILE
            )
            unit = (needed - self.with_setting(key, value - multiple).rank_memory(role)) / multiple
            if unit <= 0 or least >= value:
                continue
            wanted = max(least, int((value - num_bytes / unit) // multiple * multiple))
            saved = (value - wanted) * unit
            enough = "" if saved >= num_bytes else ", not enough alone"
            advice.append(f"{key}={wanted} (now {value}) saves {saved / GIB:.2f} GiB{enough}")
        return advice


def read_facts(config: Config) -> Facts:
    """From settings and the target's config.json.

    Raises:
        ConfigError: there is no config.json, or the drafter does not fit it.
    """
    target, drafter = config.target, config.drafter
    try:
        spec = read_spec(target.path, target.revision, target.trust_remote_code)
        layers = choose_capture_layers(target.capture_layers, spec.num_layers, drafter.num_layers)
        mask = drafter.mask_token_id or 0  # which row it is costs nothing
        shape = drafter_shape(drafter, spec, num_capture_layers=len(layers), mask_token_id=mask)
        sizes = read_sizes(
            target.path,
            target.revision,
            spec,
            num_layers=layers[-1] + 1,
            trust_remote_code=target.trust_remote_code,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return Facts(config, spec, sizes, shape, layers)
