"""Fixtures that several parts of the tests use."""

import os
from pathlib import Path

import pytest
from depth import VARIABLE, emulator_is_verified, is_long
from hypothesis import settings

# Set it before anything imports transformers or vllm: no test may download a model.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

EMULATOR = Path(__file__).parent / "emulator/tests"
# The longest files, in the order of duration: starting them last would leave workers idle.
LONGEST = (
    "test_loop.py",
    "test_hardware_report.py",
    "test_scenarios.py",
    "test_hybrid_targets.py",
    "test_generate.py",
    "test_generate_rows.py",
    "test_generate_answers.py",
    "test_main_path.py",
    "test_quantised_targets.py",
    "test_tensor_parallel.py",
    "test_start_up.py",
    "test_start_up_errors.py",
    "test_demo_serve.py",
    "test_speculators.py",
    "test_expert_communication.py",
    "test_model_runner_v2.py",
    "test_shutdown.py",
    "test_slow_storage.py",
    "test_any_traffic.py",
    "test_two_machines.py",
    "test_readme_commands.py",
    "test_vision_targets.py",
    "test_plan.py",
    "test_mooncake.py",
    "test_doctor.py",
    "test_generate_shards.py",
    "test_wheel.py",
    "test_killed_engine.py",
    "test_cli_demo.py",
    "test_generate_resume.py",
    "test_generate_interrupts.py",
    "test_crash.py",
    "test_cli_pipes.py",
    "test_generate_run.py",
    "test_installed.py",
    "test_demo_models.py",
    "test_soak.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="also run tests marked `long`, and random searches in full (depth.py)",
    )
    parser.addoption(
        "--traffic-runs",
        type=int,
        help="runs of random traffic (tests/e2e/traffic/test_any_traffic.py)",
    )
    parser.addoption("--kills", type=int, help="sinks to kill (tests/ut/storage/test_crash.py)")
    parser.addoption(
        "--soak", type=int, help="requests to a worker (tests/ut/connector/test_soak.py)"
    )
    parser.addoption(
        "--fuzz-inputs",
        type=int,
        help="mutated inputs to readers (tests/ut/reader/test_fuzz_readers.py)",
    )
    parser.addoption(
        "--engine-soak",
        type=int,
        help="requests to an engine (tests/e2e/storage/test_engine_soak.py)",
    )
    parser.addoption(
        "--ray-rows",
        type=int,
        help="rows while a machine dies (tests/ut/generate/machines/test_ray_cluster.py)",
    )
    parser.addoption(
        "--engine-kills", type=int, help="engines to kill (tests/e2e/storage/test_killed_engine.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("long"):
        os.environ[VARIABLE] = "1"
    # Timing is unreliable on a shared machine. A short run tries the same inputs each time: only a
    # change makes it fail. `--long` tries new ones.
    settings.register_profile("hsx", deadline=None, derandomize=not is_long())
    settings.load_profile("hsx")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the tests of a verified emulator, unless named: importing them takes long."""
    if collection_path != EMULATOR or config.getoption("long") or not emulator_is_verified():
        return None
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return not any(path.is_relative_to(EMULATOR) for path in named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by LONGEST; deselect `long` tests unless `--long` is given."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out and len(left_out) < len(items) and not config.getoption("long"):
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def tiny_minimax_m2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a four-layer MiniMax-M2 with random weights."""
    from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2

    return build_minimax_m2(tmp_path_factory.mktemp("models") / "minimax_m2")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a four-layer dense Qwen3 with random weights."""
    from vllm_ascend_hsx.demo.tiny_models import build_qwen3

    return build_qwen3(tmp_path_factory.mktemp("models") / "qwen3")
