"""From .proto text to descriptors, by Google's own compiler, which ``grpcio-tools`` has inside.

The compiler runs as a process of its own: what it has to say about a file goes to its standard error, and no text that
a registry returns can end ours. It takes 40 ms.

Owns: calling the compiler, and what its descriptors mean. Must not know: where the text comes from. Neighbour:
``descriptors``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from avow import extras
from avow.errors import first_line
from avow.formats.protobuf.builtin import BUILT_IN, META_NUMBER
from avow.formats.protobuf.descriptors import BadSchema, Enum, Field, Kind, Message, Presence, Schema
from avow.formats.protobuf.layout import Many, Record, Slot
from avow.formats.protobuf.reader import Rules, StrictReader

_TIMEOUT_S = 60
_MAIN = "schema.proto"  # the name of a text that has none
_SCHEMAS_KEPT = 256
_IMPORTS_MAX = 1_000
_IMPORT = re.compile(r"""\bimport\s+(?:public\s+|weak\s+|option\s+)?["']([^"'\n]+)["']\s*;""")
_AT_A_PLACE = re.compile(r"[^:\s]+\.proto:")
_NOT_FOUND = re.compile(r"Import \"(?P<name>[^\"]+)\" was not found|(?P<file>[^:\s]+): File not found")


Imports = tuple[tuple[str, str], ...]  # texts by the names that a schema has for them, ordered


def imports_of(text: str, folder: Path) -> Imports:
    """What a file imports from its folder, and what that imports. What is not there the compiler will name."""
    found: dict[str, str] = {}
    todo = [text]
    while todo:
        for name in _IMPORT.findall(todo.pop()):
            path = PurePosixPath(name)
            if name in found or path.is_absolute() or ".." in path.parts or len(found) >= _IMPORTS_MAX:
                continue
            with suppress(OSError, ValueError):
                found[name] = (folder / path).read_text(encoding="utf-8-sig")
                todo.append(found[name])
    return tuple(sorted(found.items()))


@lru_cache(_SCHEMAS_KEPT)
def compile_text(text: str, imports: Imports = ()) -> Schema:
    """The schema that ``text`` is, or ``BadSchema``. Imports of ``google/protobuf/`` and ``BUILT_IN`` are known."""
    return read_descriptors(descriptor_set(text, imports))


@lru_cache(_SCHEMAS_KEPT)
def descriptor_set(text: str, imports: Imports = ()) -> bytes:
    """The same as a serialized FileDescriptorSet: each file after what it imports, so the text itself comes last."""
    texts = [text, *(imported for _, imported in imports)]
    known = {name: known for name, known in BUILT_IN.items() if any(name in one for one in texts)}
    with tempfile.TemporaryDirectory(prefix="avow-proto-") as name:
        folder = Path(name)
        for imported, imported_text in (known | dict(imports)).items():
            _write(folder, imported, imported_text)
        main = _MAIN
        while (folder / main).exists():
            main = f"_{main}"
        _write(folder, main, text)
        return _run(main, folder)


def _write(folder: Path, name: str, text: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.name:
        raise BadSchema(f"it imports {name!r}, which is no name of a file inside a folder")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text, encoding="utf-8", newline="\n")


def _run(name: str, folder: Path) -> bytes:
    with extras.named():
        if importlib.util.find_spec("grpc_tools") is None:
            raise ModuleNotFoundError("No module named 'grpc_tools'", name="grpc_tools")
    with tempfile.TemporaryDirectory(prefix="avow-proto-") as out:
        made = Path(out, "schema.bin")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", "--include_imports"]
        command += [f"--descriptor_set_out={made}", str(folder / name)]
        try:
            ended = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BadSchema(f"it was not compiled within {_TIMEOUT_S} s") from None
        if ended.returncode or not made.exists():
            raise _refused(ended.stderr.decode(errors="replace"), folder)
        return made.read_bytes()


def _refused(said: str, folder: Path) -> BadSchema:
    lines = [line.replace(f"{folder}/", "").strip() for line in said.splitlines()]
    # Beside warnings, and what its libraries say of themselves.
    errors = [line for line in lines if _AT_A_PLACE.match(line) and "warning:" not in line]
    problem = first_line(ValueError("\n".join(errors or lines) or "the compiler failed and said nothing"))
    if missing := next((match for match in map(_NOT_FOUND.search, lines) if match), None):
        name = missing["name"] or missing["file"]
        problem = f"it imports {name}, which is neither under its folder nor a reference of it in the registry"
    return BadSchema(f"it does not compile: {problem}")


def read_descriptors(serialized: bytes) -> Schema:
    with extras.named():
        from google.protobuf import descriptor_pb2, descriptor_pool
    files = descriptor_pb2.FileDescriptorSet.FromString(serialized).file
    pool = descriptor_pool.DescriptorPool()  # it resolves names, and the features of editions
    messages: dict[str, Message] = {}
    enums: dict[str, Enum] = {}
    for file in files:
        added = pool.AddSerializedFile(file.SerializeToString())
        for message in _all_messages(added.message_types_by_name.values()):
            messages[message.full_name] = _message(message)
            enums |= {enum.full_name: _enum(enum) for enum in message.enum_types}
        enums |= {enum.full_name: _enum(enum) for enum in added.enum_types_by_name.values()}
    main = files[-1]
    places = dict(_places(main.message_type, main.package, ()))
    return Schema(messages, enums, places)


def _all_messages(found: Sequence[Any]) -> Iterator[Any]:
    for message in found:
        yield message
        yield from _all_messages(message.nested_types)


def _places(messages: Sequence[Any], outer: str, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    written = (message for message in messages if not message.options.map_entry)
    for index, message in enumerate(written):
        name = f"{outer}.{message.name}" if outer else message.name
        yield (*place, index), name
        yield from _places(message.nested_type, name, (*place, index))


def _message(message: Any) -> Message:
    return Message(message.full_name, tuple(map(_field, message.fields)), message.GetOptions().map_entry)


def _field(field: Any) -> Field:
    kind = _KINDS[field.type]
    type_ = field.message_type or field.enum_type
    presence = Presence.EXPLICIT if field.has_presence else Presence.IMPLICIT
    # An `optional` of proto3 is in a oneof of its own, which says nothing more.
    oneof = field.containing_oneof
    shared = oneof is not None and len(oneof.fields) > 1
    return Field(
        field.number,
        field.name,
        kind,
        type_.full_name if type_ else "",
        field.is_repeated,
        Presence.REQUIRED if field.is_required else presence,
        oneof.name if shared else "",
        _default(field, kind) if field.has_default_value else None,
        *_decimal(field),
    )


def _decimal(field: Any) -> tuple[int, int]:
    """The precision and scale that Kafka Connect, Flink and ksqlDB write beside a decimal."""
    options = field.GetOptions()
    if field.message_type is None or field.message_type.full_name != "confluent.type.Decimal":
        return 0, 0
    meta = _FIELD_OPTIONS.row(options.SerializeToString())["meta"] or {"params": []}
    assert isinstance(meta, dict)
    params = dict(meta["params"])
    precision, scale = (params.get(name, "") for name in ("precision", "scale"))
    return (
        (int(precision), int(scale or 0)) if _SMALL.fullmatch(precision) and _SMALL.fullmatch(scale or "0") else (0, 0)
    )


def _default(field: Any, kind: Kind) -> object:
    if kind is Kind.ENUM:
        return _enum(field.enum_type).values[field.default_value]
    default: object = field.default_value
    return default


def _enum(enum: Any) -> Enum:
    values: dict[int, str] = {}
    for value in enum.values:
        values.setdefault(value.number, value.name)
    return Enum(enum.full_name, values)


_SMALL = re.compile("[0-9]{1,2}")
_META = Record("Meta", (Slot(2, "params", Kind.STRING, Many.MAP, Kind.STRING),))
_FIELD_OPTIONS = StrictReader(Record("FieldOptions", (Slot(META_NUMBER, "meta", _META),)), Rules(refuse_nul=False))
_KINDS = {  # FieldDescriptorProto.Type
    1: Kind.DOUBLE,
    2: Kind.FLOAT,
    3: Kind.INT64,
    4: Kind.UINT64,
    5: Kind.INT32,
    6: Kind.FIXED64,
    7: Kind.FIXED32,
    8: Kind.BOOL,
    9: Kind.STRING,
    10: Kind.GROUP,
    11: Kind.MESSAGE,
    12: Kind.BYTES,
    13: Kind.UINT32,
    14: Kind.ENUM,
    15: Kind.SFIXED32,
    16: Kind.SFIXED64,
    17: Kind.SINT32,
    18: Kind.SINT64,
}
