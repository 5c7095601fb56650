"""The .proto files that Confluent's registry knows without a reference and Kafka Connect, Flink and ksqlDB import: as
much of them as says what is on the wire. Those of ``google/protobuf/`` the compiler has itself.

Owns: these texts. Must not know: how they are compiled.
"""

from __future__ import annotations

META_NUMBER = 1088  # of the options that hold a Meta
_OPTIONS = {"file": "File", "message": "Message", "field": "Field", "enum": "Enum", "enum_value": "EnumValue"}
_META = (
    'syntax = "proto3"; package confluent; import "google/protobuf/descriptor.proto"; '
    "message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; "
    "repeated Rule rules = 4; } "
    "message Rule { string name = 1; string doc = 2; string expr = 3; string sql = 4; } "
) + " ".join(
    f"extend google.protobuf.{kind}Options {{ Meta {name}_meta = {META_NUMBER}; }}" for name, kind in _OPTIONS.items()
)

BUILT_IN = {
    "confluent/meta.proto": _META,
    "confluent/type/decimal.proto": (
        'syntax = "proto3"; package confluent.type; '
        "message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }"
    ),
    "google/type/date.proto": (
        'syntax = "proto3"; package google.type; message Date { int32 year = 1; int32 month = 2; int32 day = 3; }'
    ),
    "google/type/timeofday.proto": (
        'syntax = "proto3"; package google.type; '
        "message TimeOfDay { int32 hours = 1; int32 minutes = 2; int32 seconds = 3; int32 nanos = 4; }"
    ),
}
