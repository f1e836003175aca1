"""Test the schemas of the operators, and errors for wrong arguments and host tensors."""

import inspect

import pytest
import torch

import ascend_npu_emulator.ops as ops
from ascend_npu_emulator.ops.registration import REFERENCES
from ascend_npu_emulator.ops.schemas import NAMESPACES, OF_VLLM_ASCEND, RELEASES, schemas

DECLARED = {(namespace, name, schema) for namespace in NAMESPACES for release in RELEASES
            for name, schema in schemas(namespace, release).items() if name in REFERENCES[namespace]}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _declared() -> None:
    ops.register()
    ops.register()  # a second call has no effect


def schema_of(namespace: str, name: str) -> torch.FunctionSchema:
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")._schema


def test_each_reference_has_a_schema_in_a_release() -> None:
    referred = {(namespace, name) for namespace in NAMESPACES for name in REFERENCES[namespace]}
    assert {(namespace, name) for namespace, name, _ in DECLARED} == referred


@pytest.mark.parametrize("release", RELEASES)
def test_schemas_of_each_release_can_be_parsed(release: str) -> None:
    for name, schema in schemas(OF_VLLM_ASCEND, release).items():
        parsed = torch._C.parse_schema(f"{OF_VLLM_ASCEND}::{schema}")
        assert f"{parsed.name.partition('::')[2]}.{parsed.overload_name}".rstrip(".") == name


@pytest.mark.parametrize(
    ("namespace", "name", "schema"), sorted(DECLARED), ids=lambda each: each.partition("(")[0]
)
def test_reference_accepts_the_arguments_of_its_schema(
    namespace: str, name: str, schema: str
) -> None:
    """torch drops arguments that equal the schema default, so both defaults must agree."""
    parameters = dict(inspect.signature(REFERENCES[namespace][name]).parameters)
    kinds = {p.kind for p in parameters.values()}
    declared = {
        argument.name: argument
        for argument in torch._C.parse_schema(f"{namespace}::{schema}").arguments
    }
    for argument in declared.values():
        if argument.name not in parameters:
            assert inspect.Parameter.VAR_KEYWORD in kinds, (
                f"{argument.name} of the schema is not taken"
            )
            assert argument.kwarg_only or inspect.Parameter.VAR_POSITIONAL in kinds, (
                f"{argument.name} may be given by position"
            )
            continue
        parameter = parameters[argument.name]
        if argument.has_default_value():
            default = argument.default_value
            assert (parameter.default or None) == (default or None), (
                f"{argument.name}: {parameter.default} is not {default}"
            )
        else:
            assert parameter.default is inspect.Parameter.empty, (
                f"{argument.name} has a default that the schema lacks"
            )
    named = {
        n
        for n, p in parameters.items()
        if p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }
    assert named <= declared.keys(), f"{named - declared.keys()} are not in the schema"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_schema_is_declared_once_and_unchanged(namespace: str) -> None:
    for name in schemas(namespace):
        schema = schema_of(namespace, name)
        assert schema.name == f"{namespace}::{name.partition('.')[0]}"
        assert schema.overload_name == name.partition(".")[2]


def test_unknown_argument_is_a_schema_error() -> None:
    with pytest.raises((RuntimeError, TypeError), match="npu_swiglu"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4), axis=-1)
    with pytest.raises((RuntimeError, TypeError), match="npu_rms_norm"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 4), "gamma")


@pytest.mark.parametrize(
    ("namespace", "name"), [("npu", "npu_swiglu"), ("_C_ascend", "npu_add_rms_norm_bias")]
)
def test_host_tensors_are_refused(namespace: str, name: str) -> None:
    arguments = {
        "npu_swiglu": (torch.ones(2, 4),),
        "npu_add_rms_norm_bias": (torch.ones(2, 4),) * 3,
    }[name]
    with pytest.raises(NotImplementedError, match=f"{namespace}::{name}.*CPU"):
        getattr(getattr(torch.ops, namespace), name)(*arguments)


NAMES = {
    "npu_swiglu": True,
    "_npu_reshape_and_cache": True,
    "npu_moe_distribute_dispatch_v2": True,
    "npu_does_not_exist": False,
}


@pytest.mark.parametrize(("name", "exists"), NAMES.items())
def test_find_searches_both_namespaces_of_torch_npu(name: str, exists: bool) -> None:
    assert (ops.find(name) is not None) == exists


def test_unknown_vllm_ascend_operator_is_named_in_the_error() -> None:
    with pytest.raises(AttributeError, match="does_not_exist"):
        torch.ops._C_ascend.does_not_exist  # noqa: B018
