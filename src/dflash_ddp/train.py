"""Train a DFlash drafter.

    torchrun --nproc_per_node 8 -m dflash_ddp.train [key=value ...]     one run; each process takes a role
    python -m dflash_ddp.train [key=value ...]                          starts torchrun for the split by itself
    python -m dflash_ddp.train --multirun optim.lr=3e-4,6e-4            a sweep: a fresh torchrun for each job

`torchrun ... -m dflash_ddp.train --multirun ...` on one node does the same: its rank 0 starts the jobs, one by one.

A run is two programs: target ranks stream context features, drafter ranks learn from them.
"""

import gc
import io
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # how Hydra itself takes its words apart
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from dflash_ddp.config import Config, ConfigError, Device
from dflash_ddp.log import USER_ERROR, tell
from dflash_ddp.settings import override_problems, parse
from dflash_ddp.sweeps import note_job, run_job

if TYPE_CHECKING:  # settings are checked before torch is loaded
    from dflash_ddp.control import Control
    from dflash_ddp.drafter.intake import Features
    from dflash_ddp.startup import Run
    from dflash_ddp.world import Launch, World

CONF_DIR = Path(__file__).resolve().parent / "conf"
RANK_0_FIRST_S = 10.0  # what every rank finds is said by rank 0, and only if it does not, by others


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def main(tree: DictConfig) -> float | None:
    """Compose, check, and become a rank or start the ranks; a job of a sweep gives its accept length."""
    sys.stderr = sys.__stderr__  # `start` may have held Hydra's words back
    multirun = HydraConfig.get().mode is RunMode.MULTIRUN
    if multirun:
        leave_sweep_to_rank_0()
    try:
        config = parse(tree)
        if config.dry_run:
            check_only(config)
            return note_job(0) if multirun else None
    except ConfigError as error:
        if not multirun:
            refuse(error)
        tell(error)  # a job that cannot work leaves the others of its sweep alone
        return note_job(USER_ERROR)
    if "RANK" in os.environ and not multirun:
        run_rank(config)
        return None
    return relaunch(config)


def leave_sweep_to_rank_0() -> None:
    """A sweep under torchrun is rank 0's: it starts a fresh torchrun for each job, and nobody else anything.

    Raises:
        SystemExit: with 0 on other ranks.
    """
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        refuse("--multirun under a torchrun of several nodes: start one torchrun for each job")
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)


def start() -> None:
    """`main`; what Hydra itself refuses is said once, too."""
    heard, held_back = sys.stderr, io.StringIO()
    if os.environ.get("RANK", "0") != "0":
        sys.stderr = held_back
    given, rest = get_args_parser().parse_known_args()
    wrong = override_problems([w for w in (*given.overrides, *rest) if not w.startswith("-")])
    try:
        if wrong:
            sys.stderr = heard
            refuse("\n".join(wrong))
        main()
    finally:
        if sys.stderr is held_back:  # Hydra did not come as far as `main`
            sys.stderr = heard
            if held_back.getvalue():
                let_rank_0_speak()
                sys.stderr.write(held_back.getvalue())


def let_rank_0_speak() -> None:
    """Wait, on other ranks: torchrun ends all of them as soon as one has failed.

    So whoever finds what all find must not fail before rank 0 has said it, and then is ended here.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_FIRST_S)


def refuse(error: ConfigError | ValueError | str) -> NoReturn:
    """End because of settings, as every rank does that sees them."""
    let_rank_0_speak()
    tell(error)
    raise SystemExit(USER_ERROR)


def check_only(config: Config) -> None:
    """Print what a dry run finds; under torchrun, rank 0 does.

    Raises:
        ConfigError: something is wrong.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    from dflash_ddp.dryrun import dry_run, where_to_check

    wrong = 0
    for right, text in dry_run(config):
        sys.stdout.write(f"{'ok   ' if right else 'WRONG'} {text}\n")
        wrong += not right
    sys.stdout.flush()
    if wrong:
        count = f"{wrong} problem{'s' if wrong > 1 else ''}"
        raise ConfigError(f"dry run: {count}; nothing was started{where_to_check(config)}")
    sys.stdout.write("dry run: no problems; nothing was started\n")


def relaunch(config: Config) -> float | None:
    """Become torchrun with the processes that the split asks for; of a sweep, wait for each job."""
    hydra_config = HydraConfig.get()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(config.world_size), "-m", "dflash_ddp.train"]
    for source in hydra_config.runtime.config_sources:
        if source.provider == "command-line":
            command += ["--config-dir", source.path]
    command += [*hydra_config.overrides.task, "hydra.mode=RUN", "hydra.run.dir=."]
    sys.stderr.flush()
    if hydra_config.mode is not RunMode.MULTIRUN:
        os.execv(sys.executable, command)  # torchrun takes this process's place, and its signals
    folder = Path(hydra_config.runtime.output_dir)  # each job of a sweep has a name and a folder
    for key, value in (("name", f"{config.name}/{folder.name}"), ("output_dir", str(folder))):
        quotable = value.replace("'", r"\'")
        command.append(f"{key}='{quotable}'")
    return note_job(run_job(command))


def run_rank(config: Config) -> None:
    """Be one rank of the run."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until training begins there is nothing to save
    gc.disable()  # imports leave no garbage, only ever more to look through for it
    from dflash_ddp.log import exit_on_error, setup_logging
    from dflash_ddp.world import plan_topology, read_launch

    sys.stdin = io.StringIO()  # no library may ask a question that holds up all ranks
    launch = read_launch()
    try:
        topology = plan_topology(config.split, launch)
    except ValueError as error:
        refuse(error)
    setup_logging(
        rank=launch.rank, role=topology.role(launch.rank), verbose=topology.speaks(launch.rank)
    )
    with exit_on_error() as handler:
        from dflash_ddp.control import Control
        from dflash_ddp.jobstore import JobStore
        from dflash_ddp.preflight import device_type
        from dflash_ddp.profiling import record_memory
        from dflash_ddp.startup import prepare_run
        from dflash_ddp.stopping import listen
        from dflash_ddp.world import close_world, init_world

        gc.enable()
        gc.freeze()  # nor is there any in them later: not in a step, not when the rank ends
        store = JobStore(launch)
        control = Control(store, launch, topology, heartbeat_timeout_s=config.heartbeat_timeout_s)
        handler.publish = partial(end_job, control, config)
        if config.device is not Device.cpu:  # before the question below, which wakes the driver
            choose_gpu(config, launch)
        device = device_type(config.device)
        run = prepare_run(config, launch, store, control)
        listen(control)
        control.phase("connect")
        world = init_world(
            topology,
            launch,
            store,
            device_type=device,
            share_gpu=config.split.share_gpu,
            lane_ctas=config.split.lane_ctas,
        )
        if config.profile.memory and device == "cuda":
            record_memory()
        play_roles(run, world, control)
        control.done()
        control.wait_all_done()
        close_world(world)
        control.close()


def choose_gpu(config: Config, launch: "Launch") -> None:
    """Choose this rank's GPU; if there are too few, the first rank of the node says it.

    Raises:
        ConfigError: see `set_gpu_variables`.
    """
    from dflash_ddp.world import set_gpu_variables

    try:
        set_gpu_variables(launch, share_gpu=config.split.share_gpu)
    except ConfigError:
        time.sleep(RANK_0_FIRST_S if launch.local_rank else 0)
        raise


def end_job(control: "Control", config: Config, error: BaseException) -> NoReturn:
    """End all ranks. A problem with settings is printed by the rank that found it, and only there."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        from dflash_ddp.profiling import out_of_memory

        try:
            tell(out_of_memory(config, control.topology.role(control.rank), control.rank, error))
        except (ConfigError, OSError, RuntimeError) as trouble:
            # The first cause must still be told.
            tell(f"no advice on memory: {trouble}")
    if isinstance(error, ConfigError):
        tell(error)
        control.abort(f"{control.topology.describe(control.rank)} refuses the settings")
    control.fail(error)


def play_roles(run: "Run", world: "World", control: "Control") -> None:
    """The programs of this rank; the first drafter rank prints the summary."""
    from dflash_ddp.channel import FeatureReceiver

    topology = world.topology
    if topology.role(world.rank) == "target":
        from dflash_ddp.target.worker import stream_features

        stream_features(run, world, control)
        return
    from dflash_ddp.drafter.worker import DrafterWorker

    features: Features
    if topology.colocated:
        from dflash_ddp.colocated import LocalFeatures

        features = LocalFeatures(run, world.device, topology.drafter_ranks.index(world.rank))
    else:
        features = FeatureReceiver(
            world,
            control,
            run.schedule,
            num_slots=run.config.split.depth + 1,
            slot_bytes=run.slot_bytes,
            dtype=str(run.feature_dtype),
        )
    worker = DrafterWorker(run, world, control, features)
    summary = worker.train()
    if worker.log is None or worker.saver is None:
        return
    from dflash_ddp import report
    from dflash_ddp.runlog import AFTER_STOP_S, FINISH_S

    stopped = summary.stopped_by is not None
    control.phase("finish wandb")
    worker.log.close(limit_s=AFTER_STOP_S if stopped else FINISH_S)
    report.write_or_warn(run.folder)
    sys.stdout.write(
        f"{run.config.name}: {summary.text(generated=run.config.data.heldout_generated)}\n"
    )
    sys.stdout.flush()
    worker.saver.upload_rest(stopped=stopped)  # last: what hangs here loses nothing else


if __name__ == "__main__":
    start()
