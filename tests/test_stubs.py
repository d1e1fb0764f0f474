"""The stubs that are checked in are those of the `.proto` files."""

import importlib
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
SOURCES = sorted(path.relative_to(PROTO_ROOT) for path in PROTO_ROOT.rglob("*.proto"))

Compiled = dict[str, descriptor_pb2.FileDescriptorProto]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Every .proto file's descriptor, compiled now, by file name."""
    output = tmp_path_factory.mktemp("descriptors") / "all.binpb"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--descriptor_set_out={output}",
            *map(str, SOURCES),
        ]
    )
    assert code == 0
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return {descriptor.name: descriptor for descriptor in descriptors.file}


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_checked_in_stub_has_the_descriptor_of_its_proto_file(
    source: Path, compiled: Compiled
) -> None:
    module = importlib.import_module(".".join(source.with_suffix("").parts) + "_pb2")
    checked_in = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(checked_in)
    expected = compiled[source.as_posix()]
    # protoc's own output has these; a descriptor that went through Python has not.
    for field in _fields(expected):
        field.ClearField("json_name")
    assert checked_in == expected, "run `make proto`"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_service_of_a_proto_file_has_its_grpc_stub(source: Path, compiled: Compiled) -> None:
    module = importlib.import_module(".".join(source.with_suffix("").parts) + "_pb2_grpc")
    for service in compiled[source.as_posix()].service:
        stub = getattr(module, f"{service.name}Servicer")
        for method in service.method:
            assert callable(getattr(stub, method.name)), "run `make proto`"


def test_every_service_rpc_message_enum_and_field_has_a_comment() -> None:
    missing = []
    for source in SOURCES:
        lines = (PROTO_ROOT / source).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            words = line.split()
            if not words or words[0] in ("//", "syntax", "package", "import", "option", "reserved"):
                continue
            is_definition = words[0] in ("service", "rpc", "message", "enum") or "= " in line
            above = lines[number - 1].strip()
            if is_definition and not (above.startswith("//") or "//" in line):
                missing.append(f"{source}:{number + 1}: {line.strip()}")
    assert missing == []


def _fields(
    file: descriptor_pb2.FileDescriptorProto,
) -> list[descriptor_pb2.FieldDescriptorProto]:
    found: list[descriptor_pb2.FieldDescriptorProto] = []
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        found.extend(message.field)
        pending.extend(message.nested_type)
    return found
