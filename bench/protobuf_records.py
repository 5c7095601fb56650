"""The payment of seven columns as Protobuf, for ``bench/decode.py``."""

from __future__ import annotations

from avow.formats.protobuf.encode import encode
from avow.formats.protobuf.plugin import ProtobufConfig

SCHEMA = """\
syntax = "proto3";
package bench;
import "google/protobuf/timestamp.proto";
message Payment {
  int64 id = 1;
  string account = 2;
  double amount = 3;
  google.protobuf.Timestamp at = 4;
  string note = 5;
  bool settled = 6;
  int32 kind = 7;
}
"""


def records(rows: int) -> list[bytes]:
    """Messages of about 62 bytes, without a frame."""
    schema = ProtobufConfig.model_validate({"format": "protobuf", "schema": SCHEMA}).protobuf_schema
    return [
        encode(
            schema,
            {
                "id": number,
                "account": f"acc-{number % 10_000:06}",
                "amount": number % 999 + 0.5,
                "at": f"2026-01-01T00:00:{number % 60:02}.{number % 1_000_000:06}Z",
                "note": "a note of some bytes",
                "settled": number % 2 == 0,
                "kind": number % 5,
            },
        )
        for number in range(rows)
    ]
