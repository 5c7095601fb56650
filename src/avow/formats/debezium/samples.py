"""Change events as Debezium 3.6 writes them of a table in PostgreSQL, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal

from avow.formats.base import Reason, Samples
from avow.formats.debezium.change import NOT_A_CHANGE
from avow.formats.debezium.values import NOT_DECLARED, UNAVAILABLE

_SOURCE = (
    b'{"version":"3.6.2.Final","connector":"postgresql","name":"p4","ts_ms":1795133987453,"snapshot":"false",'
    b'"db":"postgres","sequence":"[\\"25713256\\",\\"25715792\\"]","ts_us":1795133987453425,'
    b'"ts_ns":1795133987453425000,"schema":"public","table":"pk2","txId":795,"lsn":25715792,"xmin":null,"origin":null,'
    b'"origin_lsn":null}'
)
_TIMES = b'"ts_ms":1795133987726,"ts_us":1795133987726419,"ts_ns":1795133987726419570'


def _event(op: bytes, before: bytes, after: bytes) -> bytes:
    row = b'{"before":%s,"after":%s,"source":%s,"transaction":null,"op":"%s",%s}'
    return row % (before, after, _SOURCE, op, _TIMES)


_ROW_SCHEMA = (
    b'{"type":"struct","fields":[{"type":"int32","optional":false,"field":"a"},'
    b'{"type":"string","optional":false,"field":"b"},{"type":"int32","optional":true,"field":"v"},'
    b'{"type":"bytes","optional":true,"name":"org.apache.kafka.connect.data.Decimal","version":1,'
    b'"parameters":{"scale":"3","connect.decimal.precision":"12"},"field":"n"},'
    b'{"type":"int64","optional":true,"name":"io.debezium.time.Timestamp","version":1,"field":"ts"},'
    b'{"type":"int32","optional":true,"name":"io.debezium.time.Date","version":1,"field":"d"}],"optional":true,'
    b'"name":"p1.public.pk2.Value","field":"%s"}'
)


def _with_schema(payload: bytes, row_schema: bytes = _ROW_SCHEMA) -> bytes:
    return (
        b'{"schema":{"type":"struct","fields":[%s,%s,{"type":"struct","fields":[{"type":"string","optional":false,'
        b'"field":"version"}],"optional":false,"name":"io.debezium.connector.postgresql.Source","version":1,'
        b'"field":"source"},{"type":"string","optional":false,"field":"op"}],"optional":false,'
        b'"name":"p1.public.pk2.Envelope","version":2},"payload":%s}'
    ) % (row_schema % b"before", row_schema % b"after", payload)


def _row(op: str, **columns: object) -> Mapping[str, object]:
    row = dict.fromkeys(("a", "b", "v", "n", "ts", "d")) | columns
    return row | {"__op": op, "__source_lsn": 25715792}


_FULL = _row("c", a=7, b="n", v=1, n=Decimal("-1234567890.120"), ts=datetime(2026, 1, 31, 12), d=date(2026, 1, 31))
_AFTER = b'{"a":7,"b":"n","v":1,"n":"/uCOBPs4","ts":1769860800000,"d":20484}'
_SMALL = b'{"a":1,"b":"x","v":null}'

SAMPLES = Samples(
    decode={
        "format": "debezium",
        "schema": "a int not null, b string not null, v int, n decimal(14,3), ts timestamp_ntz, d date, "
        "__op string not null, __source_lsn long",
    },
    good=(
        (_with_schema(_event(b"c", b"null", _AFTER)), _FULL),
        (_with_schema(_event(b"u", _SMALL, _SMALL)), _row("u", a=1, b="x")),
        (_event(b"r", b"null", b'{"a":8,"b":"\xc3\xa9","v":-1,"d":-719162}'), _row("r", a=8, b="é", v=-1, d=date.min)),
        (_event(b"d", b'{"a":2,"b":"y","v":null}', b"null"), _row("d", a=2, b="y")),
        (b" " + _with_schema(_event(b"c", b"null", _AFTER)), _FULL),
    ),
    bad=(
        (b"", Reason.EMPTY),
        (b"{", Reason.NOT_JSON),
        (b"[1]", Reason.NOT_OBJECT),
        (b'{"a":7,"b":"n","v":1}', NOT_A_CHANGE),  # flattened
        (b'{"schema":null,"payload":{"ts_ms":1795133983983}}', NOT_A_CHANGE),  # a heartbeat
        (b'{"status":"BEGIN","id":"777:25595616","event_count":null,"data_collections":null,"ts_ms":1}', NOT_A_CHANGE),
        (_event(b"x", b"null", _SMALL), NOT_A_CHANGE),
        (_event(b"u", _SMALL, b"null"), NOT_A_CHANGE),
        (_event(b"c", b"null", b"7"), Reason.WRONG_TYPE),
        (_event(b"c", b"null", b'{"a":7,"b":"n","new":1}'), Reason.UNKNOWN_FIELD),
        (_event(b"c", b"null", b'{"a":7,"b":null}'), Reason.MISSING_FIELD),
        (_event(b"c", b"null", b'{"a":7,"b":"\\u0000"}'), Reason.NUL),
        (_event(b"c", b"null", b'{"a":7,"b":"__debezium_unavailable_value"}'), UNAVAILABLE),
        (_event(b"c", b"null", b'{"a":7,"b":"n","n":"1234"}'), NOT_DECLARED),  # base64, or a number
        (_event(b"c", b"null", b'{"a":7,"b":"n","ts":1769860800000}'), NOT_DECLARED),
        (_with_schema(_event(b"c", b"null", b'{"a":7,"b":"n","n":"f/////////8="}')), Reason.OUT_OF_RANGE),
        (_with_schema(_event(b"c", b"null", _SMALL), _ROW_SCHEMA.replace(b"int32", b"string")), Reason.WRONG_TYPE),
        (_with_schema(b"7"), Reason.NOT_OBJECT),
    ),
)
