"""Names of torch_npu and torch.npu exist, or raise an error with the full name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch_npu
from PIL import Image

from ascend_npu_emulator import import_hooks
from ascend_npu_emulator.missing import NotEmulated


def named_in_vllm_ascend() -> set[str]:
    """Return every dotted name under torch_npu and torch.npu in the installed wheel."""
    spec = importlib.util.find_spec("vllm_ascend")
    assert spec is not None and spec.submodule_search_locations
    paths = [
        path
        for path in Path(spec.submodule_search_locations[0]).rglob("*.py")
        if "_cann_ops_custom" not in path.parts
    ]
    nodes = (
        node
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    )
    return {
        name for node in nodes if (name := dotted(node)).startswith(("torch_npu.", "torch.npu."))
    }


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


NAMES = named_in_vllm_ascend()
# Numbers of dtypes that torch lacks: op_plugin/meta/_meta_registrations.py, torch_npu 2.10.0.post4.
TYPES = {
    "torch_npu.hifloat8": 290,
    "torch_npu.float8_e8m0fnu": 293,
    "torch_npu.float4_e2m1fn_x2": 296,
}


def lookup(name: str) -> object:
    first, *rest = name.split(".")
    found: object = importlib.import_module(first)
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", sorted(NAMES - TYPES.keys()))
def test_names_that_vllm_ascend_uses_exist_or_raise_with_the_name(name: str) -> None:
    if isinstance(found := lookup(name), NotEmulated):
        with pytest.raises(
            NotImplementedError, match=name.split(".")[2 if name.startswith("torch.") else 1]
        ):
            found()


@pytest.mark.parametrize(("name", "number"), TYPES.items())
def test_dtypes_that_torch_lacks_are_operator_codes(name: str, number: int) -> None:
    assert lookup(name) == number


def test_unknown_names_are_errors_with_the_full_name() -> None:
    for module, name in (
        (torch_npu, "npu_no_such_operator"),
        (torch.npu, "no_such_function"),
        (torch_npu, "no_such_thing"),
    ):
        assert not hasattr(module, name)
        full_name = f"{module.__name__.replace('ascend_npu_emulator', 'torch')}.{name}"
        with pytest.raises(NotImplementedError, match=f"{full_name} does not exist"):
            getattr(module, name)


NOT_EMULATED = (
    "torch_npu.profiler.profile",
    "torch_npu.npu.make_graphed_callables",
    "torch_npu.npu.memory.memory_snapshot",
    "torch_npu.multiprocessing.reductions.rebuild_npu_tensor",
)


@pytest.mark.parametrize("name", NOT_EMULATED)
def test_unemulated_names_can_be_imported_and_raise_when_used(name: str) -> None:
    module, _, last = name.rpartition(".")
    with pytest.raises(NotImplementedError, match=f"{last} is not implemented by the emulated NPU"):
        getattr(importlib.import_module(module), last)()


def test_modules_that_vllm_ascend_imports_exist() -> None:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL
    from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions
    from torch_npu.profiler import dynamic_profile

    importlib.import_module("torch_npu._inductor")
    assert _register_atb_extensions() is None
    assert callable(ProcessGroupHCCL.Options)
    assert isinstance(dynamic_profile, ModuleType)
    assert torch_npu.npu is torch.npu is sys.modules["torch.npu"]
    assert torch.distributed.is_hccl_available()
    assert torch_npu.__version__ == version("torch_npu")


def test_torch_npu_names_are_registered_torch_operators() -> None:
    assert torch_npu.npu_rms_norm is torch.ops.npu.npu_rms_norm
    with pytest.raises((RuntimeError, TypeError), match="npu_rms_norm"):
        torch_npu.npu_rms_norm(torch.ones(2, device="npu"), gama=torch.ones(2, device="npu"))


def test_soc_matches_the_wheel() -> None:
    from vllm_ascend.utils import check_ascend_device_type, enable_custom_op

    check_ascend_device_type()
    assert enable_custom_op()


def test_device_functions_agree_with_torch_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.npu.device_count() == 8
    with torch.npu.device(3):
        assert torch.accelerator.current_device_index() == torch.npu.current_device() == 3
        assert torch.device("npu").index is None
    torch.accelerator.set_device_index(2)
    assert torch.npu.current_device() == 2
    torch.npu.set_device("npu:0")
    assert torch.get_device_module("npu") is torch.npu
    with pytest.raises(ValueError, match="Expected a npu device"):
        torch.npu.set_device("cpu")


# ---- hooks that run after an import ----


def test_module_is_patched_before_its_importer_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hooked_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("value = 1\n")
    (package / "reader.py").write_text("from hooked_package.inner import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_hooks.install(
        {"hooked_package.inner": lambda module: setattr(module, "value", module.value + 1)}
    )
    reader = importlib.import_module("hooked_package.reader")
    assert reader.value == 2
    inner = sys.modules["hooked_package.inner"]
    assert inner.__spec__ is not None
    assert inner.__file__ == str(package / "inner.py")
    importlib.reload(inner)
    assert inner.value == 2


def test_imported_module_is_patched_immediately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("hooked_already")
    monkeypatch.setitem(sys.modules, "hooked_already", module)
    import_hooks.install({"hooked_already": lambda m: setattr(m, "patched", True)})
    assert module.patched
    with pytest.raises(ValueError, match="module hooked_already already has a patch"):
        import_hooks.install({"hooked_already": lambda m: None})
    monkeypatch.delitem(import_hooks._finder.patches, "hooked_already")


# ---- the stub of torchvision ----


def test_torchvision_name_can_be_imported_and_raises_when_used() -> None:
    transforms = importlib.import_module("torchvision.transforms")
    with pytest.raises(NotImplementedError, match=r"torchvision\.transforms\.Resize"):
        transforms.Resize(3)


def test_torchvision_image_functions_equal_pillow() -> None:
    """Pixels differ by at most 2 of 256 levels, because Pillow rounds between two passes."""
    transforms = importlib.import_module("torchvision.transforms.v2").functional
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    tensor = transforms.pil_to_tensor(image)
    assert torch.equal(tensor, torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(
        transforms.pil_to_tensor(image.convert("L"))[0],
        torch.from_numpy(np.array(image.convert("L"))),
    )
    for mode in ("BILINEAR", "BICUBIC"):
        expected = np.array(image.resize((12, 50), Image.Resampling[mode])).astype(int)
        resized = transforms.resize(
            tensor, [50, 12], interpolation=transforms.InterpolationMode[mode]
        )
        assert resized.dtype == torch.uint8
        assert np.abs(resized.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 2
    assert transforms.resize(tensor, (20, 30)) is tensor
    with pytest.raises(NotImplementedError, match="resize"):
        transforms.resize(tensor, [50, 12], interpolation=transforms.InterpolationMode.NEAREST)
    normal = transforms.normalize(tensor.double(), [1.0, 2.0, 3.0], [2.0, 4.0, 8.0])
    assert torch.equal(normal[2], (tensor[2].double() - 3) / 8)


def test_removed_torchvision_name_is_an_import_error() -> None:
    """datasets 5.1.0 compares value types with VideoReader (formatting/torch_formatter.py:83)."""
    with pytest.raises(ImportError):
        from torchvision.io import VideoReader  # noqa: F401
    with pytest.raises(ImportError):
        importlib.import_module("torchvision.io.VideoReader")


def test_tensor_data_can_be_set_across_devices() -> None:
    """torch_npu allows this. vllm-ascend loads the scales of an int8 KV cache this way."""
    parameter = torch.nn.Parameter(torch.ones(1, device="npu"), requires_grad=False)
    parameter.data = torch.arange(3.0)
    assert (parameter.device.type, parameter.tolist()) == ("cpu", [0.0, 1.0, 2.0])
    parameter.data = parameter.data.to("npu")
    assert (parameter.device.type, parameter.tolist()) == ("npu", [0.0, 1.0, 2.0])
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.eye(2).to_sparse()
