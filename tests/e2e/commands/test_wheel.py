"""The wheel, installed beside each release without the checkout: every patch point holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import distributions
import openai
import pytest

from ascend_npu_emulator.launch import environment
from vllm_ascend_hsx import load
from vllm_ascend_hsx.demo.client import EXTRA_BODY
from vllm_ascend_hsx.demo.server import Server, free_port

VLLM = """import sys
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with only the wheel; it sees the packages of this environment."""
    where = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    (wheel,) = distributions.build(tmp_path_factory.mktemp("built")).glob("*.whl")
    pip = [where / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = where.glob("lib/python*/site-packages")
    # Only paths: the .pth of the editable install is not read.
    (site / "release.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    # The program that pip would have made for vllm in this environment.
    program = where / "bin" / "vllm"
    program.write_text(f"#!{where}/bin/python\n{VLLM}")
    program.chmod(0o755)
    return where / "bin"


def without_checkout() -> dict[str, str]:
    """The environment of a program on emulated NPUs that does not see this checkout."""
    ignored = ("PYTHONPATH", "VLLM_PLUGINS")
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    site = environment()["PYTHONPATH"].partition(os.pathsep)[0]
    return {**inherited, **environment(npus=2), "PYTHONPATH": site}


def output(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, env=without_checkout(), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hsx_serve_works_from_the_wheel_alone(
    installed: Path, tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    """The wheel has no emulator. The emulated torch_npu stands for the installed one."""
    code = "import vllm_ascend_hsx; print(vllm_ascend_hsx.__file__)"
    assert output(installed / "python", "-c", code, cwd=tmp_path).startswith(str(installed.parent))
    rows = tmp_path / "rows"
    rows.mkdir()
    port = free_port()
    command = [
        *(installed / "hsx", "serve", tiny_minimax_m2, "--layers", "1,2,4", "--out", rows),
        *("--", "--port", port, "--enforce-eager", "--gpu-memory-utilization", "0.3"),
        *("--max-model-len", "128", "--enable-expert-parallel", "--tensor-parallel-size", "2"),
    ]
    log = tmp_path / "server.log"
    with Server(
        list(map(str, command)), port=port, log=log, environment=without_checkout()
    ) as server:
        server.wait_ready(600)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.completions.create(
            model=str(tiny_minimax_m2), prompt=[1, 2, 3], max_tokens=1, extra_body=EXTRA_BODY
        )
        states = load(answer.model_dump()["kv_transfer_params"]["hidden_states_path"], timeout=60)
        assert states.token_ids.tolist() == [1, 2, 3]
        assert states.hidden_states.shape[:2] == (3, 3)


@pytest.mark.long
def test_the_doctor_of_the_wheel_finds_no_problem(installed: Path, tmp_path: Path) -> None:
    words = ("doctor", "--json", "--out", "rows", "--model", "minimax-m2")
    found = json.loads(output(installed / "hsx", *words, cwd=tmp_path))["findings"]
    assert "problem" not in {each["verdict"] for each in found}
