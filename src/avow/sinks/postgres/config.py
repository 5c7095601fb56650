"""``[sink]`` with ``kind = "postgres"``.

Owns: its keys and the rules of their values. Must not know: how rows are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, PrivateAttr, SecretStr

from avow.settings import TOPIC, TableSinkConfig
from avow.settings.values import climbs, has_control, refuse


@dataclass(frozen=True, slots=True)
class Table:
    """A table's name in its parts; the sink quotes each of them."""

    name: str
    schema: str | None = None  # None: the first schema of the connection's search path

    def __str__(self) -> str:
        parts = (self.name,) if self.schema is None else (self.schema, self.name)
        return ".".join(p if re.fullmatch(r"(\w|\{topic\})+", p) else '"' + p.replace('"', '""') + '"' for p in parts)


def parse_table(value: Any) -> Table:
    allowed = '"table" or "schema.table"; a name that contains a dot: ["schema", "we.ird"] or ["we.ird"]'
    parts = value.split(".") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) not in (1, 2) or not all(isinstance(p, str) and p for p in parts):
        refuse("is not a table name", allowed)
    return Table(*reversed(parts))


def postgres_url(value: SecretStr) -> SecretStr:
    """Never quotes the URL, nor what urllib says of it."""
    allowed = 'postgresql://user@host:port/database, best as "${env:DATABASE_URL}"'
    url = value.get_secret_value()
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("postgresql", "postgres") or not url.startswith(f"{parts.scheme}://"):
        refuse("is not a PostgreSQL URL", allowed)
    if has_control(url) or " " in url:
        refuse("contains a space or a control character", f"{allowed}; other characters as %XX")
    _check_as_libpq_reads_it(url.partition("://")[2])
    if any(climbs(path) for _, path in parse_qsl(parts.query)):
        refuse("contains a path with ..", "paths without ..")
    return value


def _check_as_libpq_reads_it(rest: str) -> None:
    """A password with a character that ends it is read as a host or a port, and libpq's message then shows it."""
    escaped = "in a password: @ as %40, / as %2F, : as %3A, ? as %3F, # as %23, % as %25"
    base, _, _ = rest.partition("?")
    authority, _, path = base.partition("/")
    who, at, hosts = authority.rpartition("@")
    if "@" in who or "@" in path:
        refuse("has more than one @, or an @ after a /: the password is not escaped", escaped)
    if re.search("%(?![0-9A-Fa-f]{2})", rest):
        refuse("has a % without two hexadecimal digits: the password is not escaped", escaped)
    for host in (hosts if at else authority).split(","):
        port = re.sub(r"^\[[^]]*\]", "", host).partition(":")[2]
        if port and not (port.isascii() and port.isdigit()):
            refuse("has a port that is not a number, or a password that is not escaped", escaped)


class PostgresConfig(TableSinkConfig):
    """[sink] with kind = "postgres"."""

    table_key: ClassVar[str] = "table"
    name_bytes_max: ClassVar[int | None] = 63
    reserved_columns: ClassVar[frozenset[str]] = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
    columns_max: ClassVar[int | None] = 1_600

    kind: Literal["postgres"] = Field(description='"postgres"')
    url: Annotated[SecretStr, AfterValidator(postgres_url)] = Field(description="postgresql://user@host:port/database")
    table: Annotated[Table, PlainValidator(parse_table), PlainSerializer(str)] = Field(
        description='"table", "schema.table" or ["schema", "table"]; {topic} in it stands for the topic'
    )
    evolve: Literal["refuse", "add"] = Field("refuse", description='"refuse" or "add"')

    _timeout_s: float | None = PrivateAttr(None)

    @property
    def timeout_s(self) -> float | None:
        """Of connecting, and of each statement; None: the server's own."""
        return self._timeout_s

    def with_timeout(self, seconds: float) -> Self:
        bounded = self.model_copy()
        bounded._timeout_s = seconds
        return bounded

    @property
    def target(self) -> str:
        return f"table {self.shown('table')}"

    def _table_of(self, name: str) -> Table:
        schema = self.table.schema
        return Table(self.table.name.replace(TOPIC, name), schema and schema.replace(TOPIC, name))

    def check_table(self) -> None:
        for name in filter(None, (self.table.schema, self.table.name)):
            if wrong := self.name_problem(name):
                refuse(f"{name!r} {wrong}", "names of at most 63 bytes, without control characters", "table")
        if self.table.schema in ("avow", "information_schema") or (self.table.schema or "").startswith("pg_"):
            refuse(f"the schema {self.table.schema!r} is reserved", "any other schema", "table")
