"""The examples pass the checkers of their kind. ruff and mypy check the recipe for Ray Data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from vllm_ascend_hsx.cli.generate import parse_arguments

EXAMPLES = Path(__file__).parents[4] / "examples"
SBATCH = EXAMPLES / "generate.sbatch"
JOB = EXAMPLES / "generate-job.yaml"
RECIPE = EXAMPLES / "ray_data.py"

# `srun` with two tasks, and `hsx` and `curl` that record their arguments.
STUBS = {
    "srun": """
while [ "${1#--}" != "$1" ]; do shift; done
for rank in 0 1; do SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 "$@" || exit; done
""",
    "hsx": """
echo "${SLURM_PROCID:-}: $*" >> "$CALLS"
if [ "$1" = serve ]; then trap 'echo ended >> "$CALLS"; exit 0' TERM; touch "$READY-$SLURM_PROCID"; while true; do sleep 0.05; done; fi
""",
    "curl": '[ -e "$READY-$SLURM_PROCID" ]\n',
}


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == sorted(
        path.name for path in (SBATCH, JOB, RECIPE)
    )


def test_batch_script_passes_shellcheck() -> None:
    whole = SBATCH.read_text()
    on_a_node = "#!/bin/bash\n" + whole.partition("bash -c '")[2].partition("' generate")[0]
    for script in (whole, on_a_node):
        for command in (["bash", "-n"], [Path(sys.executable).with_name("shellcheck"), "-"]):
            done = subprocess.run(
                command, input=script, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_batch_script_serves_and_generates_on_each_node_and_ends_its_servers(
    tmp_path: Path,
) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "CALLS": f"{tmp_path}/calls",
        "READY": f"{tmp_path}/ready",
        "SLURM_JOB_ID": "7",
    }
    words = ["bash", SBATCH, "m", "my data.jsonl", "/out"]
    done = subprocess.run(
        words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    serve = "serve m --layers eagle3 --out /out -- --tensor-parallel-size 8 --port 8000"
    generate = (
        "generate --data my data.jsonl --output /out --endpoint http://localhost:8000 --validate"
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    of_ranks = [f"{rank}: {call}" for rank in (0, 1) for call in (serve, generate)]
    assert Counter(calls) == Counter([*of_ranks, "ended", "ended", ": status /out"])
    assert subprocess.run(["bash", SBATCH], capture_output=True, check=False).returncode == 2


@pytest.mark.long  # the schemas are large: see requirements/test-all.txt
def test_job_matches_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate",
        reason="needs requirements/test-all.txt, which `make test-all` installs",
    )
    resources = list(yaml.safe_load_all(JOB.read_text()))
    for resource in resources:
        validator.validate(resource, "1.37", strict=True)
    resources[0]["spec"]["completionmode"] = "Indexed"
    with pytest.raises(validator.ValidationError):
        validator.validate(resources[0], "1.37", strict=True)


def test_job_is_indexed_with_as_many_ranks_as_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, servers = yaml.safe_load_all(JOB.read_text())
    assert (job["apiVersion"], job["kind"], servers["apiVersion"], servers["kind"]) == (
        "batch/v1",
        "Job",
        "v1",
        "ConfigMap",
    )
    spec: dict[str, Any] = job["spec"]
    # `backoffLimitPerIndex` is for indexed jobs whose pods are not restarted in place.
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == (
        "Indexed",
        "Never",
    )
    assert spec.keys() == {
        "completionMode",
        "completions",
        "parallelism",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
        "template",
    }
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert pod["volumes"][1]["configMap"]["name"] == servers["metadata"]["name"]
    assert container["command"] == ["hsx", "generate"]
    listed = tmp_path / "servers.txt"
    listed.write_text(servers["data"]["servers.txt"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    options = parse_arguments(
        [each.replace("@/etc/hsx/servers.txt", f"@{listed}") for each in container["args"]]
    )
    assert (options.world_size, options.rank) == (
        spec["completions"],
        3,
    ) and options.world_size == spec["parallelism"]
    assert options.endpoints == ("http://vllm-0.vllm:8000", "http://vllm-1.vllm:8000")


@pytest.mark.long  # Ray is large: see requirements/test-all.txt
def test_recipe_reads_every_row_on_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip(
        "ray", reason="needs requirements/test-all.txt, which `make test-all` installs"
    )
    for row, tokens in enumerate((3, 5, 9)):
        tensors = {
            "hidden_states": torch.zeros(tokens, 2, 8, dtype=torch.bfloat16),
            "token_ids": torch.arange(tokens),
        }
        save_file(tensors, tmp_path / f"hs_{row}.safetensors")
    variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, RECIPE, tmp_path]
    done = subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert (
        done.returncode == 0 and "17 tokens" in done.stdout and "UserWarning" not in done.stderr
    ), done.stdout + done.stderr
