"""What configs say of a run, put together: the sizes of both roles, what they cost and what they need."""

from dataclasses import dataclass

from dflash_ddp import costs
from dflash_ddp.config import Config, ConfigError
from dflash_ddp.costs import Gpu
from dflash_ddp.drafter.model import DrafterShape
from dflash_ddp.native import drafter_shape
from dflash_ddp.target.sizes import read_sizes
from dflash_ddp.target.tables import (
    TargetSpec,
    check_capture_layers,
    default_capture_layers,
    read_spec,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What configs say: settings, target, drafter, and the layers that are read."""

    config: Config
    spec: TargetSpec
    sizes: costs.TargetSizes
    shape: DrafterShape
    layers: list[int]

    def target_seconds(self, gpu: Gpu) -> float:
        """Predicted seconds a token of one target rank."""
        return costs.target_seconds(self.sizes, self.config.data.max_length, gpu)

    def drafter_seconds(self, gpu: Gpu, config: Config | None = None) -> float:
        """Predicted seconds a token of one drafter rank; of other settings, if given."""
        return costs.drafter_seconds(self.shape, config or self.config, self.spec.table_rows, gpu)

    def target_memory(self, config: Config | None = None) -> dict[str, int]:
        """Bytes of a target rank."""
        return costs.target_memory(self.sizes, self.shape, config or self.config)

    def drafter_memory(self, config: Config | None = None) -> dict[str, int]:
        """Bytes of a drafter rank."""
        return costs.drafter_memory(
            self.shape,
            config or self.config,
            table_rows=self.spec.table_rows,
            tied=self.spec.tied,
        )

    def rank_memory(self, role: str, config: Config | None = None) -> int:
        """Bytes of a "target", "drafter" or "colocated" rank."""
        config = config or self.config
        target, drafter = self.target_memory(config), self.drafter_memory(config)
        if role == "colocated":
            return costs.colocated_memory(target, drafter, config.split.depth)
        return sum((target if role == "target" else drafter).values())

    def memory_advice(self, role: str, num_bytes: float) -> list[str]:
        """What to lower so that a rank of this role needs so many bytes less."""
        return costs.memory_advice(
            lambda config: self.rank_memory(role, config),
            costs.LEVERS[role],
            self.config,
            num_bytes,
        )


def read_facts(config: Config) -> Facts:
    """From settings and the target's config.json.

    Raises:
        ConfigError: there is no config.json, or the drafter does not fit it.
    """
    target, drafter = config.target, config.drafter
    try:
        spec = read_spec(target.path, target.revision, target.trust_remote_code)
        layers = target.capture_layers or default_capture_layers(
            spec.num_layers, drafter.num_layers
        )
        check_capture_layers(layers, spec.num_layers)
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
