"""Operators on the device give the CPU's results, with the same aliasing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated import NPU, full, int32, scenarios, side_stream
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("any_mode")

a = torch.arange(24, dtype=torch.float32).view(2, 3, 4) / 7 - 1
ints = torch.tensor([[3, 1, 2], [0, 2, 1]])
mask = torch.tensor([[True, False, True], [False, True, True]])

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "binary": (lambda x: x * 2 + x / 3 - 1, (a,)),
    "broadcast": (torch.add, (a, a[0, :1])),
    "type promotion": (torch.mul, (ints, a[:, :, 0])),
    "0-dim CPU scalar": (lambda x: x + torch.tensor(2.5), (a,)),
    "comparison": (torch.gt, (a, a.flip(0))),
    "matmul": (lambda x: x @ x.transpose(1, 2), (a,)),
    "addmm in bfloat16": (lambda x: torch.addmm(x[0], x[0, :, :3], x[1]), (a.bfloat16(),)),
    "bmm": (torch.bmm, (a, a.transpose(1, 2))),
    "linear": (F.linear, (a, a[0], a[0, :, 0])),
    "embedding": (F.embedding, (ints, a.view(6, 4))),
    "softmax": (lambda x: x.softmax(-1), (a,)),
    "log_softmax of a view": (lambda x: x.transpose(0, 2).log_softmax(0), (a,)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,), x[0, 0], x[1, 1]), (a,)),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        (a.unsqueeze(0),),
    ),
    "cat": (lambda x, y: torch.cat([x, y.float()], -1), (a[0], ints.T)),
    "stack": (lambda x: torch.stack([x, x + 1]), (a,)),
    "split": (lambda x: x.split([1, 2], 1), (a,)),
    "unbind": (lambda x: x.unbind(2), (a,)),
    "topk": (lambda x: x.topk(2), (a,)),
    "sort": (lambda x: x.sort(descending=True, stable=True), (a,)),
    "argmax": (lambda x: x.argmax(-1), (a,)),
    "cumsum": (lambda x: x.cumsum(0), (ints,)),
    "sum and mean": (lambda x: (x.sum(), x.mean(1), x.std()), (a,)),
    "where": (torch.where, (mask, ints, -ints)),
    "masked_fill": (lambda x, m: x.masked_fill(m, float("-inf")), (a[:, :, 0], mask)),
    "gather": (lambda x, i: x.gather(1, i), (a[:, :, 0], ints.clamp(max=2))),
    "scatter_add": (
        lambda x, i: torch.zeros(2, 4, device=x.device).scatter_add(1, i, x),
        (a[:, :, 0], ints),
    ),
    "index": (lambda x, i: x[1, i], (a, ints.clamp(max=2))),
    "index by mask": (lambda x, m: x[m], (ints, mask)),
    "index by a CPU tensor": (lambda x: x[torch.tensor([1, 0])], (a,)),
    "index with gaps": (lambda x, i: x[:, None, i[0].clamp(max=2)], (a, ints)),
    "nonzero": (lambda m: m.nonzero(), (mask,)),
    "masked_select": (torch.masked_select, (ints, mask)),
    "unique": (lambda x: x.unique(return_inverse=True, return_counts=True), (ints,)),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x[0], x[1]), (ints,)),
    "bincount": (lambda x: torch.bincount(x.flatten(), minlength=6), (ints,)),
    "bitwise": (lambda x: (x << 2) | 1, (ints,)),
    "cast": (lambda x: x.to(torch.bfloat16).to(torch.int8), (a,)),
    "reinterpret": (lambda x: x.view(torch.int32), (a,)),
    "complex": (lambda x: torch.view_as_complex(x.reshape(2, 6, 2)).conj() * 2, (a,)),
    "pad": (lambda x: F.pad(x, (1, 2), value=3.0), (a,)),
    "tril": (lambda x: x.tril(), (a,)),
    "roll and flip": (lambda x: x.roll(1, 0).flip(2), (a,)),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), (a,)),
    "conv1d": (lambda x: F.conv1d(x, x[:, :, :2]), (a,)),
    "foreach": (lambda x: torch._foreach_mul([x, x + 1], 2.0), (a,)),
    "float8": (lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), (a,)),
    "item": (lambda x: x.max().item(), (a,)),
    "tolist": (lambda x: x.tolist(), (ints,)),
    "equal": (lambda x: torch.equal(x, x.clone()), (a,)),
}


def same(got: Any, expected: Any, device: torch.device) -> None:
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.device, one.dtype, one.shape) == (device, other.dtype, other.shape)
            # Composite operators may take another path on the device. Rounding may differ.
            torch.testing.assert_close(
                one.cpu().resolve_conj(), other.resolve_conj(), rtol=1e-6, atol=1e-6
            )
        else:
            assert one == other


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@scenarios("operator, inputs", OPERATORS)
def test_operators_equal_the_cpu(
    operator: Callable[..., Any], inputs: tuple[Any, ...], side: bool
) -> None:
    on_device = [x.to(NPU) for x in inputs]
    with side_stream() if side else nullcontext():
        got = operator(*on_device)
    torch.npu.synchronize()
    same(got, operator(*inputs), NPU)


FACTORIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "empty": lambda d: torch.empty(2, 3, device=d).fill_(1),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "full": lambda d: torch.full((2,), 7, device=d),
    "arange": lambda d: torch.arange(2, 9, 3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
    "from a list of scalars": lambda d: torch.as_tensor([1.5, 2.5], device=d),
}


@scenarios("make", FACTORIES)
def test_factories_create_tensors_on_the_given_device(
    make: Callable[[Any], torch.Tensor],
) -> None:
    same(make("npu:1"), make("cpu"), torch.device("npu:1"))
    with torch.npu.device(2):
        same(make("npu"), make("cpu"), torch.device("npu:2"))


def test_results_keep_the_device_index_of_their_inputs() -> None:
    x = torch.ones(3, device="npu:3")
    assert torch.npu.current_device() == 0
    assert {
        t.device.index for t in (x + 1, x.nonzero(), x.view(3, 1), x.sort()[1], torch.empty_like(x))
    } == {3}


# ---- aliasing ----

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[1],
    "view": lambda x: x.view(6, 4),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(2, 3, 4),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (5, 3), 1),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: x.chunk(2, 2)[1],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "detach": lambda x: x.detach(),
    "reinterpret": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_the_bytes_of_their_base(name: str) -> None:
    cpu, npu = a.clone(), a.to(NPU)
    on_cpu, on_npu = VIEWS[name](cpu), VIEWS[name](npu)
    assert on_npu.untyped_storage().data_ptr() == npu.untyped_storage().data_ptr()
    assert (on_npu.stride(), on_npu.storage_offset()) == (on_cpu.stride(), on_cpu.storage_offset())
    if name not in ("expand", "unfold", "reinterpret"):
        on_cpu.mul_(3)
        on_npu.mul_(3)
    npu.flatten()[0] = 42
    cpu.flatten()[0] = 42
    same(on_npu, on_cpu, NPU)
    same(npu, cpu, NPU)


# Steps of a random program: (least dimensions, least length of the first dimension, step).
STEPS: dict[str, tuple[int, int, Callable[[torch.Tensor], object]]] = {
    "t": (2, 0, lambda x: x.transpose(0, -1)),
    "slice": (1, 2, lambda x: x[1:]),
    "select": (2, 1, lambda x: x[..., 0]),
    "flip": (1, 0, lambda x: x.flip(0)),
    "reshape": (0, 0, lambda x: x.reshape(-1)),
    "write": (0, 1, lambda x: x.__setitem__((0,) * x.dim(), 5)),
    "scale": (0, 0, lambda x: x.mul_(1.5)),
    "index_put": (1, 1, lambda x: x.__setitem__(torch.tensor([0], device=x.device), 2.0)),
    "copy": (1, 2, lambda x: x.__setitem__(slice(1), x[1:2].clone())),
}


@given(st.lists(st.sampled_from(list(STEPS)), max_size=8))
def test_chains_of_views_and_writes_equal_the_cpu(names: list[str]) -> None:
    cpu, npu = a.clone(), a.to(NPU)
    x, y = cpu, npu
    for dimensions, length, step in map(STEPS.__getitem__, names):
        if x.dim() >= dimensions and (x.dim() == 0 or len(x) >= length):
            x, y = (each if (result := step(each)) is None else result for each in (x, y))
    same(y, x, NPU)
    same(npu, cpu, NPU)


def test_resized_out_shares_its_storage_with_earlier_views() -> None:
    out = torch.empty(0, device=NPU)
    again = out.view(0)
    result = torch.add(full(1.0, 3), 1, out=out)
    assert result is out
    assert out.tolist() == [2, 2, 2]
    assert again.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    values, indices = torch.empty(0, device=NPU), torch.empty(0, dtype=torch.long, device=NPU)
    torch.sort(torch.tensor([2.0, 1.0], device=NPU), out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([1.0, 2.0], [1, 0])
    listed = torch.empty(0, device=NPU)
    torch.cat([full(1.0, 2), torch.zeros(1, device=NPU)], out=listed)
    assert listed.tolist() == [1, 1, 0]


def test_resize_and_set_keep_bytes_and_storage() -> None:
    x = torch.arange(4.0, device=NPU)
    x.resize_(2, 3)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]
    y = torch.empty(0, device=NPU)
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1, 3]
    y.set_(x)
    assert y.shape == (2, 3)
    assert y.data_ptr() == x.data_ptr()
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    z = torch.arange(3.0, device=NPU)
    z.data = full(1.0, 2)
    assert z.tolist() == [1, 1]


def test_histc_counts_integers() -> None:
    """torch's CPU kernel counts floats only. Integers are counted in the bins [0, 1), [1, 2)."""
    counts = torch.histc(int32(0, 3, 1, 3, 3, 7).npu(), bins=8, min=0, max=8)
    assert (counts.dtype, counts.tolist()) == (torch.int32, [1, 1, 0, 3, 0, 0, 0, 1])
    assert torch.histc(torch.tensor([0.5, 2.0], device="npu"), bins=2, min=0, max=2).tolist() == [
        1.0,
        1.0,
    ]


def test_in_place_operators_return_their_argument() -> None:
    x = full(1.0, 3)
    assert x.add_(1) is x
    assert x.zero_() is x
    torch._foreach_add_([x], 2)
    assert x.tolist() == [2, 2, 2]


def test_large_tensors_are_zeroed_in_full() -> None:
    x = torch.full((9 << 20,), 3, dtype=torch.int16, device=NPU)
    x[1:-1].zero_()
    assert (x[0].item(), x[-1].item(), int(x[1:-1].abs().max())) == (3, 3, 0)
    assert int(torch.zeros(5 << 20, dtype=torch.int32, device=NPU).max()) == 0


# ---- calls that hardware refuses ----

REFUSED: dict[str, Callable[[], object]] = {
    "npu and cpu": lambda: full(1.0, 2) + torch.ones(2),
    "a list of npu and cpu": lambda: torch.cat([full(1.0, 2), torch.ones(2)]),
    "cpu indices of an embedding": lambda: F.embedding(
        torch.tensor([0]), torch.ones(2, 2, device=NPU)
    ),
    "cpu out": lambda: torch.add(full(1.0, 2), 1, out=torch.empty(2)),
    "npu out of cpu inputs": lambda: torch.add(torch.ones(2), 1, out=torch.empty(2, device=NPU)),
    "two npus": lambda: full(1.0, 2) + torch.ones(2, device="npu:1"),
    "matmul of cpu and npu": lambda: torch.ones(2, 2, device=NPU) @ torch.ones(2, 2),
    "cpu values of an index_put": lambda: torch.ones(4, device=NPU).index_put_(
        (torch.tensor([0, 1], device=NPU),), torch.ones(2)
    ),
}


@scenarios("call", REFUSED)
def test_tensors_of_two_devices_in_one_operator_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        call()


def test_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Invalid NPU device id 63.*NPU_EMULATOR_NPUS"):
        torch.empty(1, device="npu:63")
    with pytest.raises(RuntimeError, match="Invalid NPU device id"):
        torch.npu.set_device(63)


def test_numpy_of_a_device_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="npu"):
        torch.ones(1, device=NPU).numpy()


# ---- copies, files, pickles ----


def test_copies_between_devices_keep_the_values() -> None:
    x = torch.arange(6.0).view(2, 3)
    there = x.to("npu:1")
    assert there.to("npu:2").device.index == 2
    assert torch.equal(there.to("npu:2").cpu(), x)
    y = torch.empty(3, 2, device=NPU)
    y.t().copy_(there)
    assert torch.equal(y.cpu(), x.t())
    assert torch.equal(torch.zeros(2, 3, dtype=torch.int64).copy_(there), x.long())
    assert torch.equal(x.npu().cpu(), x)
    assert x.npu().is_npu
    assert torch.equal(copy.deepcopy(there).cpu(), x)


def test_saved_and_pickled_tensors_load_unchanged() -> None:
    x = torch.arange(6.0, device="npu:1")
    file = io.BytesIO()
    torch.save({"x": x, "tail": x[3:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device == x.device
    loaded["x"][4] = 9
    assert loaded["tail"].tolist() == [3, 9, 5]
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == x.tolist()
    file.seek(0)
    assert torch.load(file, map_location="npu:2")["x"].device.index == 2
    assert pickle.loads(pickle.dumps(x)).tolist() == x.tolist()
    assert str(x).startswith("tensor([0., 1., 2.")


def test_gradients_of_a_module_on_the_device_equal_the_cpu() -> None:
    torch.manual_seed(0)
    cpu = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1))
    npu = copy.deepcopy(cpu).npu()
    x = torch.randn(5, 3)
    for model, inputs in ((cpu, x), (npu, x.npu())):
        model(inputs).square().mean().backward()
    for ours, theirs in zip(npu.parameters(), cpu.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.device == NPU
        assert torch.allclose(ours.grad.cpu(), theirs.grad, atol=1e-6)


def test_inference_mode_gives_the_same_results() -> None:
    with torch.inference_mode():
        x = full(1.0, 3)
        x[1] = 5
        assert (x * 2).tolist() == [2, 10, 2]
        assert x.view(3, 1).is_inference()
