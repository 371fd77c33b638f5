"""The recipes for clusters: KubeRay's manifest against the fields of its CRD and, its pods, the schemas of Kubernetes;
and the batch script with stand-ins.

scripts/ray_hosts.sh is run on hosts of their own by tests/controller/test_hosts.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.31"


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object that has no other fields than these, as the API server prunes or refuses them."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def each(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, COUNT, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
MODE = {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]}
POD = {"type": "object"}  # see the test of the pods
HEAD = fields(("template",), rayStartParams=TEXTS, template=POD, serviceType=TEXT, enableIngress=YES)
WORKERS = fields(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(name=NAME, generateName=TEXT, namespace=NAME, labels=TEXTS, annotations=TEXTS),
    spec=fields(
        ("rayClusterSpec",),
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        submissionMode=MODE,
        backoffLimit=COUNT,
        activeDeadlineSeconds=COUNT,
        shutdownAfterJobFinishes=YES,
        ttlSecondsAfterFinished=COUNT,
        suspend=YES,
        rayClusterSpec=fields(
            ("headGroupSpec",),
            rayVersion=TEXT,
            enableInTreeAutoscaling=YES,
            headGroupSpec=HEAD,
            workerGroupSpecs=each(WORKERS),
        ),
    ),
)
"""The part of the CRD ``rayjobs.ray.io`` (v1) that a run needs; names, types and required fields are its own."""


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "scripts" / "kuberay.yaml").read_text())


def test_the_kuberay_manifest_has_the_fields_of_its_crd(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(RAY_JOB)
    jsonschema.validate(manifest, RAY_JOB)
    # What a validator is for: a field that the API server does not know, and one that is missing.
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParameters"] = {}
    with pytest.raises(jsonschema.ValidationError, match="'rayStartParameters' was unexpected"):
        jsonschema.validate(manifest, RAY_JOB)


def test_the_pods_of_the_kuberay_manifest_are_pods_of_kubernetes(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError, match="'volumeMount' was unexpected"):
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_kuberay_manifest_is_the_run_it_says(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    driver, *overrides = manifest["spec"]["entrypoint"].removeprefix("python ").split()
    assert (ROOT / driver).is_file()
    devices = [int(n) for n in re.findall(r"pools\.\w+\.devices=\[(\d+)\]", " ".join(overrides))]
    assert devices == [gpus] * workers["replicas"]


# Each says in the log on which node it ran.
STAND_INS = {
    "scontrol": 'printf "a\\nb\\nc\\n"',
    "hostname": """echo "10.0.0.$(($(printf %d "'$NODE") - 96)) 192.168.0.1\"""",
    "srun": 'while [[ $1 == --* ]]; do last=$1; shift; done; NODE=${last#--nodelist=} exec "$@"',
    "ray": 'echo "$NODE: ray $*" >>"$LOG"; [[ $1 != start ]] || exec sleep 2',
    "python": "[[ $2 != *secrets* ]] || { echo secret; exit; }\n"
    '[[ $2 != *ray.nodes* ]] || until [ "$(grep -c "ray start" "$LOG")" = 3 ]; do sleep 0.05; done\n'
    """all=$*; echo "$NODE: python ${all//$'\\n'/ } " >>"$LOG\"""",
}


def batch_script(tmp_path: Path, wait: int = 60, **bodies: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script as SLURM would run it on the first of three nodes, and what its log says."""
    for name, body in (STAND_INS | bodies).items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BIN": str(tmp_path),
        "LOG": str(log),
        "WAIT": str(wait),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "[a-c]",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    script = [str(ROOT / "scripts" / "slurm.sbatch"), "examples/grpo.py", "pools.train.devices=[8,8,8]"]
    done = subprocess.run(["bash", *script], env=environment, capture_output=True, text=True, timeout=60)
    return done, log.read_text().splitlines()


def test_the_batch_script_starts_a_node_each_and_the_driver_on_the_first(tmp_path: Path) -> None:
    done, lines = batch_script(tmp_path)
    assert done.returncode == 0, done.stderr
    size = "--num-cpus=32 --num-gpus=8"
    assert "a: ray start --head --block --node-ip-address=10.0.0.1 --port=20077 " + size in lines
    for node, address in (("b", "10.0.0.2"), ("c", "10.0.0.3")):
        assert f"{node}: ray start --block --address=10.0.0.1:20077 --node-ip-address={address} {size}" in lines
    assert any(line.startswith("a: python -c") and line.endswith("10.0.0.1:20077 3 60 ") for line in lines)
    assert "a: python examples/grpo.py pools.train.devices=[8,8,8] ray.address=10.0.0.1:20077 " in lines


def test_the_batch_script_ends_where_no_head_answers(tmp_path: Path) -> None:
    ray = STAND_INS["ray"].replace("[[ $1 != start ]]", "[[ $1 != health-check ]] || exit 1; [[ $1 != start ]]")
    done, lines = batch_script(tmp_path, wait=1, ray=ray)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Ray on node a (10.0.0.1:20077) after 1 s; see its lines above, or raise")
    assert not any("examples/grpo.py" in line for line in lines)


def test_the_batch_script_ends_where_nodes_do_not_come(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(
        "def init(*_, **__): pass\n"
        "def nodes(): return [dict(Alive=n != 2, NodeManagerAddress=f'10.0.0.{n}') for n in (1, 2, 3)]\n"
    )
    python = f'[[ $2 != *ray.nodes* ]] || PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n{STAND_INS["python"]}'
    done, lines = batch_script(tmp_path, wait=1, python=python)
    assert done.returncode == 1
    assert "error: 2 of 3 nodes have joined after 1 s: ['10.0.0.1', '10.0.0.3']; see the lines" in done.stderr
    assert not any("examples/grpo.py" in line for line in lines)


def test_the_script_for_hosts_takes_a_command_whose_path_has_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my ray"
    folder.mkdir()
    (folder / "ray").write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/log\n')
    (tmp_path / "on").write_text('#!/bin/bash\nexec bash -c "$2"\n')
    for path in (folder / "ray", tmp_path / "on"):
        path.chmod(0o755)
    environment = {**os.environ, "RAY": str(folder / "ray"), "ON": str(tmp_path / "on"), "HEAD_ARGS": "--num-cpus=8"}
    script = str(ROOT / "scripts" / "ray_hosts.sh")
    for action in ("start", "stop"):
        done = subprocess.run([script, action, "a"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    generated, started, stopped = (tmp_path / "log").read_text().splitlines()
    assert (generated, stopped) == ("get-auth-token --generate", "stop --force")
    assert re.fullmatch(r"start --head --node-ip-address=\S+ --port=6379 --num-cpus=8", started)


@pytest.mark.parametrize("arguments", [[], ["start"], ["begin", "a"]])
def test_the_script_for_hosts_says_how_it_is_called(arguments: list[str]) -> None:
    script = str(ROOT / "scripts" / "ray_hosts.sh")
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/ray_hosts.sh start HOST..." in done.stderr and "scripts/ray_hosts.sh stop HOST..." in done.stderr
