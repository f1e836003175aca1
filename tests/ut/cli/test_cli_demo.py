"""`hsx demo` from end to end with a fake server. Faults of the server must be reported."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_hsx.cli import demo
from vllm_ascend_hsx.demo import target
from vllm_ascend_hsx.demo.options import ServeOptions

FAKE_SERVER = Path(__file__).parents[1] / "fakes" / "serve.py"


@pytest.fixture
def fake(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> pytest.MonkeyPatch:
    """Let the demo start the fake server. HSX_TEST_FAULT selects the fault."""
    known = tmp_path_factory.getbasetemp() / "known"

    def command(self: ServeOptions) -> list[str]:
        arguments = [self.model, self.storage, list(self.layer_ids), self.port, "--known", known]
        return [
            sys.executable,
            str(FAKE_SERVER),
            *map(str, arguments),
            "--fault",
            os.environ.get("HSX_TEST_FAULT", "none"),
        ]

    monkeypatch.setattr(ServeOptions, "command", command)
    monkeypatch.setattr(demo, "_environment", lambda options: {})
    monkeypatch.setattr(demo, "_compile_emulator", lambda console: None)
    monkeypatch.setattr("vllm_ascend_hsx.demo.server.STOP_SECONDS", 1.0)
    return monkeypatch


def test_matching_requests_give_exit_code_0(
    fake: pytest.MonkeyPatch,
    tiny_minimax_m2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.main(["--model", str(tiny_minimax_m2), "--output", str(tmp_path / "out")]) == 0
    output, progress = capsys.readouterr()
    assert "16 of 16 requests match" in output
    assert "300 × 3 × 256" in output
    assert re.search(r"token ids +│ +320 │ +39 │ +320 × 3 × 256 │", output)
    assert str(tmp_path / "out" / "server.log") in progress
    assert re.search(r'vllm:hsx_files_total\{outcome="published"\} +│ +0 │ +16 │', output)
    assert re.search(
        r"vllm:hsx_publish_seconds: P50, P99, count +│ +none │ +0\.38 ms, 0\.50 ms, 16 │", output
    )
    assert "prompt_tokens" not in output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shifted", "13 of 16 requests match"),
        ("shifted decodes", "7 of 16 requests match"),
        ("foreign tokens", "0 of 16 requests match"),
        ("no params", "has no hidden_states_path"),
        ("miscounts", "/metrics counts 15 files for 16 answers"),
        ("dies", "the server ended with exit code 3"),
    ],
)
def test_wrong_server_gives_exit_code_1(
    fault: str,
    message: str,
    fake: pytest.MonkeyPatch,
    tiny_minimax_m2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.setenv("HSX_TEST_FAULT", fault)
    assert demo.main(["--model", str(tiny_minimax_m2), "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    output = printed.out + printed.err
    assert message in output
    if fault == "shifted":
        assert "shifted by -1" in output.replace("\n", " ")
    if fault == "dies":
        assert "the weights are of another model" in output


def test_long_steps_are_compared_with_the_reference_and_with_each_other(
    fake: pytest.MonkeyPatch,
    tiny_minimax_m2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(tiny_minimax_m2), "--output", str(tmp_path / "out"), "--long-steps"]
    assert demo.main(arguments) == 0
    output = capsys.readouterr().out
    assert output.count("8 of 8 requests match") == 2
    assert "eager and with graphs: prompts and 284 of 284 generated tokens compared" in output


def test_difference_between_graphs_and_eager_gives_exit_code_1(
    fake: pytest.MonkeyPatch,
    tiny_minimax_m2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a reference, each run is right by itself."""
    fake.setenv("HSX_TEST_FAULT", "graphs differ")
    arguments = ["--model", str(tiny_minimax_m2), "--output", str(tmp_path / "out"), "--long-steps"]
    assert demo.main([*arguments, "--no-reference"]) == 1
    output = capsys.readouterr().out
    assert output.count("8 of 8 requests are finite and complete (not compared)") == 2
    assert "request 1: rows 400-431 are" in output.replace("\n", " ")


def test_shapes_and_token_ids_are_checked_without_a_reference(
    fake: pytest.MonkeyPatch,
    tiny_minimax_m2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--model",
        str(tiny_minimax_m2),
        "--output",
        str(tmp_path / "out"),
        "--no-reference",
    ]
    assert demo.main(arguments) == 0
    assert "not compared" in capsys.readouterr().out
    fake.setenv("HSX_TEST_FAULT", "foreign tokens")
    assert demo.main([*arguments[:3], str(tmp_path / "again"), "--no-reference"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "npu"], "--device npu needs --model PATH"),
        (
            ["--tensor-parallel-size", "0"],
            "argument --tensor-parallel-size: '0' is not a whole number from 1 to 4096",
        ),
        (["--late", "--device", "npu", "--model", "m"], "leave it out"),
        (["--device", "gpu"], "invalid choice: 'gpu'"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            "1,x",
            (
                "--layers='1,x' is not a list of layer ids. Give distinct ids from 0 (the "
                "embedding "
                "output) to 4"
            ),
        ),
        ("1,1", "has id 1 twice. Give distinct ids from 0 (the embedding output) to 4"),
        ("5", "distinct ids from 0"),
        ("-1", "distinct ids from 0"),
    ],
)
def test_invalid_layers_are_reported_before_a_server_starts(
    layers: str, message: str, tiny_minimax_m2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--model", str(tiny_minimax_m2), f"--layers={layers}"]) == 2
    assert message in capsys.readouterr().err


def test_an_output_that_is_no_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert demo.main(["--output", str(file)]) == 2
    assert (
        f"--output={str(file)!r} cannot be a directory: File exists. Give a new"
        in capsys.readouterr().err.replace("\n", " ")
    )


def test_a_directory_without_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err.replace("\n", " ")


def test_model_that_does_not_fit_is_reported_with_the_option_to_use(
    tiny_minimax_m2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "available_memory", lambda: 1)
    assert demo.main(["--model", str(tiny_minimax_m2)]) == 1
    assert "call again with --no-reference" in capsys.readouterr().err.replace("\n", " ")


def test_lack_of_a_free_port_is_reported_without_a_traceback(
    tiny_minimax_m2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        used = other.getsockname()[1]
        monkeypatch.setattr("vllm_ascend_hsx.demo.server.PORTS", range(used, used + 1))
        assert demo.main(["--model", str(tiny_minimax_m2), "--no-reference"]) == 1
    assert "no free TCP port was found" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("layers", "ids"), [(1, (0, 1)), (4, (1, 2, 4)), (62, (2, 31, 59, 62))])
def test_default_layers_end_with_the_last(layers: int, ids: tuple[int, ...]) -> None:
    assert target.default_layers(layers) == ids


def running(output: Path) -> list[str]:
    """Return the command lines of processes that use this output directory."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # the process ended meanwhile
            lines.append(path.read_text(errors="replace"))
    return [line for line in lines if str(output / "hidden_states") in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_too(
    number: signal.Signals, tiny_minimax_m2: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
from vllm_ascend_hsx.cli import demo
from vllm_ascend_hsx.demo import target
from vllm_ascend_hsx.demo.options import ServeOptions
ServeOptions.command = lambda self: [sys.executable, "-c", "import signal; signal.pause()", str(self.storage)]
demo._environment = lambda options: {{}}
demo._compile_emulator = lambda console: None
sys.exit(demo.main(["--model", {str(tiny_minimax_m2)!r}, "--output", {str(tmp_path)!r}, "--no-reference"]))
"""
    # A shell starts background processes, possibly these tests, with SIGINT ignored.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert process.stderr is not None
    # The line that StartProgress prints once the server runs.
    assert any("importing vllm" in line for line in iter(process.stderr.readline, ""))
    assert running(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number is signal.SIGINT else 128 + number)
    assert not running(tmp_path)
