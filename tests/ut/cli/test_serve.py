"""`hsx serve`: the command that is shown and executed, and refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_ascend_hsx.cli import plan
from vllm_ascend_hsx.cli.serve import main, parse_arguments
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.serve.command import Command, build
from vllm_ascend_hsx.serve.model import Model, read_model
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.target import layer_ids

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 62}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return a_model(tmp_path / "model", CONFIG)


def a_model(directory: Path, config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def command(
    model: Path,
    *vllm: str,
    layers: str = "eagle3",
    out: str = "/data/states",
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Command:
    return build(str(model), layers, Path(out), options or {}, vllm, environ or {})


def json_behind(arguments: Sequence[str], option: str) -> Any:
    return json.loads(arguments[arguments.index(option) + 1])


def test_command_is_vllm_serve_with_two_more_options(model: Path) -> None:
    built = command(
        model, "--tensor-parallel-size", "8", layers="2,30,62", options={"io": "direct"}
    )
    assert built.arguments[:5] == ("vllm", "serve", str(model), "--tensor-parallel-size", "8")
    assert json_behind(built.arguments, "--speculative-config") == speculative_config([2, 30, 62])
    options = {"allow_custom_save_path": True, "io": "direct"}
    assert json_behind(built.arguments, "--kv-transfer-config") == kv_transfer_config(
        "/data/states", **options
    )
    assert (len(built.arguments), built.environ, built.notes) == (9, {}, ())


def test_mooncake_needs_no_directory_but_shards_do(model: Path) -> None:
    store = {"master_server_address": "store:50051"}
    built = command(model, options={"sink": "mooncake", "mooncake": store})
    assert json_behind(built.arguments, "--kv-transfer-config")["kv_connector_extra_config"] == {
        "sink": "mooncake",
        "mooncake": store,
    }
    built = command(model, options={"sink": "shard", "shard_bytes": "1 GiB"})
    wanted = {
        "shared_storage_path": "/data/states",
        "allow_custom_save_path": True,
        "sink": "shard",
        "shard_bytes": "1 GiB",
    }
    assert (
        json_behind(built.arguments, "--kv-transfer-config")["kv_connector_extra_config"] == wanted
    )


def test_chosen_paths_are_allowed_by_default(model: Path) -> None:
    for options, allowed in (({}, True), ({"allow_custom_save_path": False}, False)):
        config = json_behind(command(model, options=options).arguments, "--kv-transfer-config")[
            "kv_connector_extra_config"
        ]
        assert config["allow_custom_save_path"] is allowed


def test_shown_command_can_be_pasted_into_a_shell(model: Path) -> None:
    built = command(
        model, "--served-model-name", "it's mine", environ={"VLLM_PLUGINS": "ascend,a b"}
    )
    words = shlex.split(str(built))
    assert words[0] == "VLLM_PLUGINS=ascend,a b,ascend_hsx"
    assert tuple(words[1:]) == built.arguments


def test_a_relative_directory_is_made_absolute(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json_behind(command(model, out="states").arguments, "--kv-transfer-config")
    assert config["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "states")


@pytest.mark.parametrize(
    ("set_to", "expected"),
    [
        (None, {}),
        ("ascend,ascend_hsx", {}),
        ("ascend", {"VLLM_PLUGINS": "ascend,ascend_hsx"}),
        ("", {"VLLM_PLUGINS": "ascend_hsx"}),
    ],
)
def test_a_server_that_loads_only_some_plugins_loads_ours(
    model: Path, set_to: str | None, expected: dict[str, str]
) -> None:
    environ = {} if set_to is None else {"VLLM_PLUGINS": set_to}
    assert command(model, environ=environ).environ == expected


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("eagle3", (2, 31, 59, 62)),
        ("dflash", (2, 31, 59, 62)),
        ("mtp", (62,)),
        ("62,0,5", (62, 0, 5)),
        (" 7 , 8", (7, 8)),
    ],
)
def test_layers_can_be_given_by_id_or_by_the_kind_of_drafter(
    text: str, ids: tuple[int, ...]
) -> None:
    assert layer_ids(text, 62) == ids


def test_layer_rule_matches_speculators(model: Path) -> None:
    utils = pytest.importorskip(
        "speculators.models.utils", reason="speculators is only in the environment of the tests"
    )
    config = {**CONFIG, "model_type": "qwen3", "num_attention_heads": 4, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="not explicitly set"):
        theirs = utils.resolve_target_layer_ids(None, str(model))
    assert (*theirs, 62) == layer_ids("eagle3", 62) == layer_ids("dflash", 62)


@given(
    text=st.one_of(
        st.text(max_size=12),
        st.lists(st.integers(-3, 70), max_size=5).map(lambda ids: ",".join(map(str, ids))),
    )
)
def test_any_other_layers_are_ids_of_the_target_or_refused_by_value(text: str) -> None:
    try:
        ids = layer_ids(text, 62)
    except UserError as error:
        assert str(error).startswith(f"--layers={text!r} ")
        assert (
            "Give distinct ids from 0 (the embedding output) to 62 (after the last layer)"
            in str(error)
        )
    else:
        assert len(set(ids)) == len(ids) > 0
        assert all(0 <= each <= 62 for each in ids)


SMALL = {
    1: "selects 2,0,-2,1 of 1 layers, so it has id 2, which the target does not have",
    2: "selects 2,1,-1,2 of 2 layers, so it has id -1, which the target does not have",
    3: "selects 2,1,0,3 of 3 layers, so it is out of order",
    4: "selects 2,2,1,4 of 4 layers, so it has id 2 twice",
    6: "selects 2,3,3,6 of 6 layers, so it has id 3 twice",
    7: None,
}


@pytest.mark.parametrize("layers", [[], ["--layers", "eagle3"], ["--layers", "dflash"]])
@pytest.mark.parametrize("num_layers", SMALL)
def test_serve_and_plan_refuse_a_target_too_small_for_a_rule(
    num_layers: int, layers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(
        a_model(tmp_path / "model", {**CONFIG, "hidden_size": 64, "num_hidden_layers": num_layers})
    )
    for name, command, words in (("serve", main, ["--dry-run"]), ("plan", plan.main, [])):
        code = command([model, *layers, *words])
        said = capsys.readouterr().err
        if SMALL[num_layers] is None:
            assert (code, said) == (0, "")
        else:
            assert code == 2
            refused = (
                f"hsx {name}: --layers='{(layers or ['', 'eagle3'])[1]}' {SMALL[num_layers]}. "
                "Give distinct ids from 0"
            )
            assert said.startswith(refused), said


@pytest.mark.parametrize(
    ("vllm", "words"),
    [
        (("--speculative-config", "{}"), "--speculative-config='{}' is set by hsx serve"),
        (("-sc", "{}"), "is set by hsx serve"),
        (
            ("--speculative_config.method=mtp",),
            "--speculative-config.method='mtp' is set by hsx serve",
        ),
        (("--spec-method", "mtp"), "is set by hsx serve"),
        (
            ("--kv-transfer-config={}",),
            (
                "is set by hsx serve. Leave it out, or start vllm serve with the options that "
                "--dry-run prints"
            ),
        ),
        (("--model", "other"), "is set by hsx serve"),
        (
            ("--pipeline-parallel-size", "2"),
            (
                "--pipeline-parallel-size='2' leaves each stage with the hidden states of its own "
                "layers only"
            ),
        ),
        (("-pp", "2"), "--pipeline-parallel-size='2' leaves"),
        (
            ("--decode_context_parallel_size=2",),
            "--decode-context-parallel-size='2' has not been shown to keep the order",
        ),
        (
            ("--additional-config", '{"enable_balance_scheduling": true}'),
            "additional_config.enable_balance_scheduling=True needs kv_role=",
        ),
        (
            ("--additional_config.enable_balance_scheduling=true",),
            "additional_config.enable_balance_scheduling=True needs kv_role=",
        ),
        (
            ("--additional-config.scheduler_config.enable_balance_scheduling", "true"),
            "additional_config.scheduler_config.enable_balance_scheduling=True needs kv_role=",
        ),
        (("-pcp=4",), "--prefill-context-parallel-size='4' reorders the tokens"),
        (("--hf-overrides", "{kv"), "--hf-overrides='{kv' is not JSON: Expecting property name"),
        (("--compilation_config={x",), "--compilation-config='{x' is not JSON"),
    ],
)
def test_unsupported_vllm_options_are_refused_with_value_and_reason(
    model: Path, vllm: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        command(model, *vllm)
    assert words in str(refused.value)


def test_a_target_that_vllm_ascend_cannot_serve_is_refused(tmp_path: Path) -> None:
    nemotron = a_model(tmp_path / "nemotron", {**CONFIG, "architectures": ["NemotronHForCausalLM"]})
    with pytest.raises(
        UserError, match=r"\(NemotronHForCausalLM\) cannot be served: its Mamba-2 layers"
    ):
        command(nemotron)


@pytest.mark.parametrize(
    "vllm",
    [
        ("-pp", "1"),
        ("--pipeline-parallel-size=1",),
        ("--seed", "-1"),
        ("--tensor-parallel-size", "2"),
        ("--additional-config", '{"enable_flashcomm1": true}'),
        ("--additional-config", "1"),
    ],
)
def test_other_options_are_passed_to_vllm_unchanged(model: Path, vllm: tuple[str, ...]) -> None:
    assert command(model, *vllm).arguments[3 : 3 + len(vllm)] == vllm


def test_an_option_of_the_connector_is_checked_before_anything_is_started(model: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"extra_config\.durabilty='fdatasync' is not an option\. Did you mean 'durability'",
    ):
        command(model, options={"durabilty": "fdatasync"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON .it nests too deep"),
        ("{}", "has no num_hidden_layers"),
        ('{"num_hidden_layers": "4"}', "has '4' for num_hidden_layers"),
        ('{"text_config": 5}', "has no num_hidden_layers"),
        (None, "has no config.json"),
    ],
)
def test_a_model_without_a_usable_config_is_refused(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words) as refused:
        read_model(str(tmp_path))
    assert str(refused.value).startswith(f"MODEL='{tmp_path}' ")


def test_a_fifo_for_a_config_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_model(str(tmp_path))


@pytest.mark.parametrize("architectures", [5, {}, [], [5], None])
def test_config_with_invalid_architectures_has_none(tmp_path: Path, architectures: object) -> None:
    assert read_model(
        str(a_model(tmp_path / "m", {"num_hidden_layers": 4, "architectures": architectures}))
    ) == Model(4, "")


def test_missing_directory_is_not_resolved_as_a_repository(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory. Give the directory"):
        read_model(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "part",
    [
        {"text_config": {"num_hidden_layers": 40}},
        {"thinker_config": {"num_hidden_layers": 2, "text_config": {"num_hidden_layers": 40}}},
    ],
)
def test_text_config_of_a_multimodal_model_is_used(part: dict[str, Any], tmp_path: Path) -> None:
    config = {"architectures": ["AnyForConditionalGeneration"], "num_hidden_layers": 1, **part}
    assert read_model(str(a_model(tmp_path / "m", config))) == Model(
        40, "AnyForConditionalGeneration"
    )


def test_config_of_a_repository_comes_from_vllm(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIG, "model_type": "qwen3", "num_attention_heads": 4, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(config))
    from vllm_ascend_hsx.compat import targets

    asked: dict[str, Any] = {}
    original = targets.published_config

    def published_config(name: str, **options: Any) -> Any:
        asked.update(options, name=name)
        return original(str(model), **options)

    monkeypatch.setattr(targets, "published_config", published_config)
    built = build(
        "Qwen/Qwen3-62", "mtp", Path("/d"), {}, ("--revision", "main", "--trust-remote-code"), {}
    )
    assert asked == {"name": "Qwen/Qwen3-62", "revision": "main", "trust_remote_code": True}
    assert json_behind(built.arguments, "--speculative-config") == speculative_config([62])


def test_unknown_target_gets_a_note(tmp_path: Path) -> None:
    (note,) = command(
        a_model(tmp_path / "m", {**CONFIG, "architectures": ["OwnForCausalLM"]})
    ).notes
    assert note.startswith("OwnForCausalLM is not a class of vLLM")


def test_a_dry_run_shows_the_command_and_starts_nothing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                str(model),
                "--out",
                "/d",
                "--option",
                "include_output_tokens=true",
                "--dry-run",
                "--",
                "--port",
                "1",
            ]
        )
        == 0
    )
    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["vllm", "serve", str(model), "--port", "1"]
    assert json_behind(words, "--kv-transfer-config") == kv_transfer_config(
        "/d", allow_custom_save_path=True, include_output_tokens=True
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "70"], "hsx serve: --layers='70' has id 70"),
        (["--option", "io=fast"], "io='fast'"),
        (["--option", "io"], "'io' is not KEY=VALUE"),
        (["--option", "io=direct", "--option", "io=buffered"], "--option io is given twice"),
        (["--option", "shared_storage_path=/data"], "give the directory with --out"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_2(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    try:
        code = main([str(model), *arguments])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


VLLM = ["--port", "8000"]


@pytest.mark.parametrize(
    ("words", "vllm", "layers"),
    [
        (["MODEL", "--", *VLLM], VLLM, "eagle3"),
        (["MODEL", *VLLM], VLLM, "eagle3"),
        (["MODEL", "--port=8000", "--layers", "mtp"], ["--port=8000"], "mtp"),
        (
            ["--layers", "mtp", "MODEL", *VLLM, "--enforce-eager", "--out", "/d"],
            [*VLLM, "--enforce-eager"],
            "mtp",
        ),
        (
            ["MODEL", "--seed", "-1", "-tp", "8", "--layers=2,5"],
            ["--seed", "-1", "-tp", "8"],
            "2,5",
        ),
        (
            ["MODEL", "--lora-modules", "a=1", "b=2", "--dry-run"],
            ["--lora-modules", "a=1", "b=2"],
            "eagle3",
        ),
        (["MODEL", "-O", "1", "--", "--layer", "x"], ["-O", "1", "--layer", "x"], "eagle3"),
        (["MODEL"], [], "eagle3"),
    ],
)
def test_unknown_options_are_passed_to_vllm(words: list[str], vllm: list[str], layers: str) -> None:
    options = parse_arguments(words)
    assert (options.model, options.vllm, options.layers) == ("MODEL", vllm, layers)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        *((word, "--layers") for word in ("--layer", "--layrs", "--layer=2", "--layers-ids")),
        *((word, "--option") for word in ("--optoin", "--opt", "--options")),
        *((word, "--dry-run") for word in ("--dry_run", "--dry")),
        ("--output", "--out"),
    ],
)
def test_misspelt_option_of_ours_is_not_passed_to_vllm(
    word: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_arguments(["MODEL", word, "x"])
    assert left.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"{word.partition('=')[0]}: did you mean {ours}? Options of vllm serve go after --" in said
    )


@pytest.mark.parametrize(
    "words", [[*VLLM, "MODEL"], ["--enforce-eager", "MODEL"], ["--port=1", "--out", "/d", "MODEL"]]
)
def test_model_must_precede_vllm_options(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_arguments(words)
    assert left.value.code == 2
    assert f"give MODEL first, before {words[0]}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "mode"), [("0640", "0640"), ("640", "640"), ('"0640"', "0640"), ("777", "777")]
)
def test_file_mode_is_octal_digits_with_or_without_quotes(
    model: Path, text: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), "--option", f"file_mode={text}", "--dry-run"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert (
        json_behind(words, "--kv-transfer-config")["kv_connector_extra_config"]["file_mode"] == mode
    )


@pytest.mark.parametrize("text", ["7777", "0888", "077", "1e3"])
def test_invalid_file_mode_is_quoted_as_typed(
    model: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model), "--option", f"file_mode={text}", "--dry-run"]) == 2
    assert f"file_mode='{text}' is not a mode of three octal digits" in capsys.readouterr().err


@pytest.mark.parametrize("found", [True, False])
def test_process_becomes_the_vllm_beside_its_python(
    model: Path, tmp_path: Path, found: bool
) -> None:
    """The server replaces the process, so that it gets a supervisor's signals."""
    program = tmp_path / "vllm"
    if found:
        tells = (
            "import os, sys\nprint(os.getpid(), *sys.argv[1:3], "
            "os.environ['VLLM_PLUGINS'])\nsys.exit(7)\n"
        )
        program.write_text(f"#!{sys.executable}\n{tells}")
        program.chmod(0o755)
    beside = f"import sys; sys.executable = {str(tmp_path / 'python')!r}"
    code = (
        f"{beside}; from vllm_ascend_hsx.cli.serve import main, parse_arguments; "
        "sys.exit(main(sys.argv[1:]))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(model), "--out", str(tmp_path / "states"), "--port", "0"],
        env={**os.environ, "VLLM_PLUGINS": "ascend", "PATH": str(tmp_path / "empty")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = started.communicate(timeout=60)
    if found:
        assert started.returncode == 7
        assert out.splitlines()[-1] == f"{started.pid} serve {model} ascend,ascend_hsx"
    else:
        assert (started.returncode, err.splitlines()[-1]) == (
            1,
            "hsx serve: vllm is not installed; install vllm and vllm-ascend",
        )
