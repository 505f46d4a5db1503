"""The examples of examples/launch, run with stand-ins for torchrun and Slurm: one job, in flags that exist.

The stand-in for `memo` tells what it is asked; the real `memo plan` answers then, in this process, and searches once
for all examples. What would start is parsed by torchrun's own parser and checked as `memo train` does.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from remembered import remembered
from suggestions import check_parses
from torch.distributed.run import get_args_parser

import memo
from memo.cli import plan as plan_command
from memo.cli.main import main
from memo.config import RunConfig, preset
from memo.config.derived import resolved_lr, resolved_lr_warmup_iters, resolved_save_interval_minutes
from memo.config.flags import load_run
from memo.config.to_hugging_face import write_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
NODES = "node1\nnode2"
TELL = f'''exec "{sys.executable}" -c "import json, sys; print(sys.argv[1], json.dumps(sys.argv[2:]))"'''
STAND_INS = {
    "memo": f'{TELL} ASKS "$@"',
    "torchrun": f'{TELL} STARTS "$@"',
    "srun": 'while [ "$1" != torchrun ]; do shift; done; exec "$@"',
    # Slow enough that whoever reads the first line alone has left before the second is written.
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && for n in 1 2; do echo node$n; sleep 0.2; done',
}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def shell(name: str) -> tuple[str, dict[str, str]]:
    """The script of an example, and the environment that its launcher gives it."""
    if name == "kubernetes.yaml":
        trainer = documents(name)[1]["spec"]["trainer"]
        assert trainer["command"] == ["bash", "-euc"] and len(trainer["args"]) == 1
        given = {entry["name"]: entry["value"] for entry in trainer["env"]}
        # As Trainer's torch plugin names them.
        given |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        return trainer["args"][0], {**given, "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node1", "PET_MASTER_PORT": "1"}
    if name == "skypilot.yaml":
        (task,) = documents(name)
        gpus = task["resources"]["accelerators"].split(":")[1]
        given = {"SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
        return task["run"], {**task["envs"], **given, "SKYPILOT_NODE_IPS": NODES, "HOME": "/nowhere"}
    if name == "slurm.sbatch":
        given = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "96"}
        return (LAUNCH / name).read_text(), {**given, "SLURM_JOB_ID": "7"}
    return (LAUNCH / name).read_text(), {"FIRST_NODE": "node1"}


def starts(name: str, folder: Path, model: Path) -> tuple[list[str], Mapping[str, str]]:
    """Arguments of torchrun, and its environment; the plan that it is to train by is written."""
    bin_folder, run = folder / "bin", folder / "run"
    for path in (bin_folder, run):
        path.mkdir()
    for command, script in STAND_INS.items():
        (bin_folder / command).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (bin_folder / command).chmod(0o755)
    script, given = shell(name)
    paths = {"MODEL": str(model), "DATA": "/shared/data/mine", "RUN": str(run)}
    paths |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    environment = {**given, **paths, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    command = ["bash", "-euc", script]  # two interpreters in turn: minutes where the machine is crowded
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600, check=False)
    told = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    problem = f"{name}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (done.returncode, [word for word, _ in told]) == (0, ["ASKS", "STARTS"]), problem
    asked, started = (json.loads(words) for _, words in told)
    assert asked[0] == "plan" and main(asked) == 0, problem
    return started, environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Llama 3.1 8B what a plan reads."""
    folder = tmp_path_factory.mktemp("Llama-3.1-8B")
    (folder / "config.json").write_text(json.dumps(write_config(preset("llama-3.1-8b"), 131072, "bfloat16").content))
    return folder


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """What each example trains, checked for 16 ranks."""
    found, answer = {}, remembered(plan_command.answer)
    for path in sorted(LAUNCH.iterdir()):
        folder = tmp_path_factory.mktemp(path.stem)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_command, "answer", answer)
            argv, environment = starts(path.name, folder, model)
            for name, value in environment.items():
                if name.startswith("PET_"):
                    patch.setenv(name, value)
            launcher = get_args_parser().parse_args(argv)
            assert (launcher.module, launcher.training_script) == (True, "memo")
            num_ranks = int(launcher.nnodes) * int(launcher.nproc_per_node)
            assert num_ranks == 16
            if "PET_MASTER_ADDR" not in environment:
                assert (launcher.rdzv_backend, launcher.rdzv_endpoint) == ("c10d", "node1:29500")
            patch.setenv("WORLD_SIZE", str(num_ranks))
            command, *flags = launcher.training_script_args
            assert command == "train"
            config = load_run(flags)
        assert config.checkpoint.save == config.checkpoint.load == str(folder / "run")  # restarts go on
        assert resolved_save_interval_minutes(config) == 30
        found[path.name] = config
    return found


def test_all_train_the_same_job(runs: dict[str, RunConfig], model: Path) -> None:
    assert runs.keys() == {"torchrun.sh", "slurm.sbatch", "kubernetes.yaml", "skypilot.yaml"}
    same = {
        replace(
            config,
            checkpoint=replace(config.checkpoint, save=None, load=None),
            logging=replace(config.logging, log_jsonl=None),
        )
        for config in runs.values()
    }
    (job,) = same
    assert job.checkpoint.pretrained_checkpoint == str(model)
    assert (resolved_lr(job), resolved_lr_warmup_iters(job)) == (1e-5, 100)
    assert (
        job.data.seq_length == 262_144 and job.model.num_layers == 32 and job.data.data_path == ("/shared/data/mine",)
    )
    question = {"seq_len": 262_144, "global_batch_size": 16, "hardware": "h100-80", "host_memory_gib": 1600.0}
    best = memo.plan("llama-3.1-8b", 16, **question).best  # type: ignore[arg-type]
    assert best is not None
    assert (job.parallel.tp, job.parallel.cp, job.parallel.pp) == (best.layout.tp, best.layout.cp, best.layout.pp)
    assert job.memory.swaps == best.strategy.swaps


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_lines_for_a_cluster_of_ones_own_can_be_uncommented(path: Path) -> None:
    """Of environment, container, weights and data: what stands before the second # is YAML, or shell and memo's."""
    found = re.findall(r"^ *# (.+?) # (environment|container|weights|data)\b", path.read_text(), re.MULTILINE)
    assert {what for _, what in found} == {"environment", "container", "weights", "data"}
    for line, _ in found:
        if path.suffix == ".yaml" and ": " in line:
            assert isinstance(yaml.safe_load(line), dict), line
        else:
            subprocess.run(["bash", "-n", "-c", line], check=True)
            if "memo data build " in line:
                check_parses(line[line.index("memo data build ") :], path.name)


def test_kubernetes_fields() -> None:
    """Of trainer.kubeflow.org/v1alpha1 as of Kubeflow Trainer 2.3."""
    runtime, job = documents("kubernetes.yaml")
    assert {document["apiVersion"] for document in (runtime, job)} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    trainer = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert job["spec"].keys() == {"runtimeRef", "trainer"} and job["spec"]["trainer"].keys() <= trainer
    assert not [entry for entry in job["spec"]["trainer"]["env"] if entry["name"].startswith("PET_")]  # reserved
    assert runtime["spec"].keys() == {"mlPolicy", "template"} and runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = replicated["template"]["metadata"]["labels"]
    assert replicated["name"] == "node" and labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"  # what the trainer's command, resources and environment are put into
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    resources = job["spec"]["trainer"]["resourcesPerNode"]
    assert resources["limits"]["nvidia.com/gpu"] == str(job["spec"]["trainer"]["numProcPerNode"])


def test_skypilot_fields() -> None:
    """Of a task as of SkyPilot 0.10."""
    (task,) = documents("skypilot.yaml")
    assert task.keys() == {"name", "num_nodes", "workdir", "resources", "volumes", "envs", "setup", "run"}
    resources = {"infra", "accelerators", "memory", "network_tier", "job_recovery"}
    assert task["resources"].keys() == resources
    assert task["resources"]["job_recovery"].keys() == {"max_restarts_on_errors"}
    assert all(isinstance(value, str) for value in task["envs"].values())


def test_slurm_directives() -> None:
    """sbatch reads no directive after the first command."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(directives) > 5 and max(directives) < first_command
