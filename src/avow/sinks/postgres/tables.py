"""The target table: its columns from a schema, made if absent, checked if present, and rows encoded to fit.

Owns: the mapping from our types to PostgreSQL's. Must not know: the ledger. Neighbours: ``session`` (a connection) and
``schema`` (our types).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Error as DatabaseError

from avow.arrow import arrow_type
from avow.errors import ConfigError
from avow.schema import Array, Decimal, Field, Map, Scalar, Struct, Type
from avow.settings import REST_COLUMN
from avow.sinks.evolution import advice, missing
from avow.sinks.json import NotJson, value_text
from avow.sinks.postgres.config import PostgresConfig, Table
from avow.sinks.postgres.session import Session, as_sink_error, message, name, unavailable

_TYPES = {
    Scalar.BOOLEAN: "boolean",
    Scalar.BYTE: "smallint",
    Scalar.SHORT: "smallint",
    Scalar.INT: "integer",
    Scalar.LONG: "bigint",
    Scalar.FLOAT: "real",
    Scalar.DOUBLE: "double precision",
    Scalar.STRING: "text",
    Scalar.BINARY: "bytea",
    Scalar.DATE: "date",
    Scalar.TIMESTAMP: "timestamp with time zone",
    Scalar.TIMESTAMP_NTZ: "timestamp without time zone",
}


@dataclass(frozen=True, slots=True)
class TableColumn:
    name: str
    type: str  # PostgreSQL's own name of it
    required: bool

    def takes(self, existing: str, *, evolves: bool = False) -> bool:
        """Whether a column of type ``existing`` can take our values without changing one. One that was widened takes
        them where the sink evolves: they are sent in its type (``widened``)."""
        if self.type == existing or (evolves and existing in _WIDER.get(self.type, ())):
            return True
        if self.type == "text":
            return re.fullmatch(r"character varying(\(\d+\))?", existing) is not None
        ours, theirs = _numeric(self.type), _numeric(existing)
        if ours and existing == "numeric":
            return True
        if ours and theirs:
            return theirs[1] >= ours[1] and theirs[0] - theirs[1] >= ours[0] - ours[1]
        return False


# What ALTER ... TYPE may make of a column without losing anything; of a numeric also one with more digits.
_WIDER = {"smallint": ("integer", "bigint"), "integer": ("bigint",), "real": ("double precision",)}


def _may_become(existing: str, wanted: str) -> bool:
    theirs, ours = _numeric(existing), _numeric(wanted)
    if theirs and ours:
        return ours[0] > theirs[0] and ours[1] == theirs[1]
    return wanted in _WIDER.get(existing, ())


def _numeric(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"numeric\((\d+),(\d+)\)", text)
    return (int(match[1]), int(match[2])) if match else None


def column_type(type_: Type) -> str:
    match type_:
        case Scalar():
            return _TYPES[type_]
        case Decimal(precision, scale):
            return f"numeric({precision},{scale})"
        case Array() | Map() | Struct():
            return "jsonb"


def columns(fields: tuple[Field, ...], sink: PostgresConfig, *, rest: bool) -> list[TableColumn]:
    """The sink's columns: the payload's, ``_rest`` where unknown fields are kept, and the four of lineage."""
    payload = [
        TableColumn(field.name, column_type(field.type), field.required or field.name in sink.key) for field in fields
    ]
    if rest:
        payload.append(TableColumn(REST_COLUMN, "jsonb", False))
    topic, partition, offset, timestamp = sink.lineage
    return [
        *payload,
        TableColumn(topic, "text", True),
        TableColumn(partition, "integer", True),
        TableColumn(offset, "bigint", True),
        TableColumn(timestamp, "timestamp with time zone", False),
    ]


def full_name(table: Table) -> str:
    return ".".join(name(part) for part in (table.schema, table.name) if part)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done to the table."""

    made: bool = False
    changes: tuple[Change, ...] = ()  # by sink.evolve


def make_or_check(session: Session, sink: PostgresConfig, wanted: list[TableColumn]) -> Prepared:
    """Make the table if it is absent; else let it follow the columns as far as ``sink.evolve`` says, and refuse it
    unless it then takes every row as it is."""
    existing = _found(session, sink.table)
    if existing is None:
        _make(session, sink, wanted)
        return Prepared(made=True)
    _check_kind(session, sink)
    changes = _changes(wanted, existing, sink)
    _refuse_differences(session, sink, wanted, _after(existing, changes))
    if changes:
        changes = _alter(session, sink, wanted, changes)
    _check_rights(session, sink, wanted)
    return Prepared(changes=tuple(changes))


def _make(session: Session, sink: PostgresConfig, wanted: list[TableColumn]) -> None:
    lines = [f"{name(c.name)} {c.type}{' NOT NULL' if c.required else ''}" for c in wanted]
    if sink.key:
        lines.append(f"PRIMARY KEY ({', '.join(map(name, sink.key))})")
    try:
        session.run(f"CREATE TABLE {full_name(sink.table)} ({', '.join(lines)})")
    except DatabaseError as error:
        raise ConfigError(
            f"table {sink.table} cannot be created: {message(error)}",
            advice="Grant the user of sink.url CREATE on the schema, or create the table and its schema beforehand.",
        ) from None


# A table that follows the declared columns (sink.evolve = "add")


@dataclass(frozen=True, slots=True)
class Change:
    """What is done to a column of the table."""

    column: TableColumn
    before: str  # its type; nothing if there was no such column

    @property
    def action(self) -> str:
        quoted, type_ = name(self.column.name), self.column.type
        return f"ALTER COLUMN {quoted} TYPE {type_}" if self.before else f"ADD COLUMN {quoted} {type_}"

    @property
    def shown(self) -> str:
        if self.before:
            return f"column {self.column.name!r} was widened from {self.before} to {self.column.type}"
        return f"column {self.column.name!r} ({self.column.type}) was added"


def _changes(wanted: list[TableColumn], existing: dict[str, _Found], sink: PostgresConfig) -> list[Change]:
    """What the table lacks, and can be given without touching what is in it."""
    if sink.evolve != "add":
        return []
    names = {other.lower() for other in existing}
    changes = []
    for column in wanted:
        found = existing.get(column.name)
        if found is None and not column.required and column.name.lower() not in names:
            changes.append(Change(column, ""))
        elif found is not None and not found.generated and _may_become(found.type, column.type):
            changes.append(Change(column, found.type))
    return changes


def _after(existing: dict[str, _Found], changes: list[Change]) -> dict[str, _Found]:
    added = _Found("", required=False, fills_itself=False, generated=False, identity_always=False)
    after = {c.column.name: replace(existing.get(c.column.name, added), type=c.column.type) for c in changes}
    return existing | after


def _alter(session: Session, sink: PostgresConfig, wanted: list[TableColumn], changes: list[Change]) -> list[Change]:
    """Alter the table, in one statement, so that it is rewritten once at most. What was done."""
    table = full_name(sink.table)
    _check_owner(session, sink, changes)
    try:
        # From here on nobody else alters it: a column that somebody has made wider still must not be narrowed.
        session.run(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        existing = _found(session, sink.table) or {}
        changes = _changes(wanted, existing, sink)
        _refuse_differences(session, sink, wanted, _after(existing, changes))
        if changes:
            session.run(_statement(sink, changes))
    except DatabaseError as error:
        if unavailable(error):
            raise
        detail = error.diag.message_detail
        raise ConfigError(
            f"table {sink.table} cannot be altered as sink.evolve wants it: {message(error)}"
            f"{f'. {detail}' if detail else ''}",
            advice=f"Alter it by hand: {_statement(sink, changes)};",
        ) from None
    return changes


def _statement(sink: PostgresConfig, changes: list[Change]) -> str:
    return f"ALTER TABLE {full_name(sink.table)} {', '.join(change.action for change in changes)}"


def _check_owner(session: Session, sink: PostgresConfig, changes: list[Change]) -> None:
    """No right can be granted to alter a table: it is its owner's."""
    ((user, owner, owns),) = session.query(
        "SELECT current_user::text, pg_get_userbyid(relowner)::text, pg_has_role(relowner, 'USAGE') FROM pg_class"
        " WHERE oid = to_regclass($1)",
        full_name(sink.table),
    )
    if not owns:
        raise ConfigError(
            f"user {user} may not alter table {sink.table}, which belongs to {owner} (SQLSTATE 42501):\n"
            + "\n".join(f"  {_lacking(change)}" for change in changes),
            advice=f"Let {owner} run: {_statement(sink, changes)}; "
            f"Or let sink.evolve do it: GRANT {name(owner)} TO {name(user)};",
        )


def _lacking(change: Change) -> str:
    column = change.column
    if change.before:
        return f"column {column.name!r} has type {change.before} instead of {column.type}"
    return f"column {column.name!r} ({column.type}) is missing"


@dataclass(frozen=True, slots=True)
class _Found:
    type: str
    required: bool
    fills_itself: bool  # a default, an identity or a generated column
    generated: bool
    identity_always: bool


def _found(session: Session, table: Table) -> dict[str, _Found] | None:
    rows = session.query(
        "SELECT attname::text, format_type(atttypid, atttypmod), attnotnull,"
        " atthasdef OR attidentity <> '' OR attgenerated <> '', attgenerated <> '', attidentity = 'a'"
        " FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
        full_name(table),
    )
    return {row[0]: _Found(*row[1:]) for row in rows} or None


_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "c": "a type"}


def _check_kind(session: Session, sink: PostgresConfig) -> None:
    """Refuse what is no table, or none that keeps its rows."""
    for where, kind, unlogged in session.query(
        "WITH RECURSIVE tree (relid) AS (SELECT to_regclass($1)::oid UNION ALL SELECT inhrelid FROM pg_inherits"
        " JOIN tree ON inhparent = relid JOIN pg_class ON oid = relid AND relkind = 'p')"
        " SELECT CASE WHEN oid = to_regclass($1) THEN $2 ELSE 'partition ' || oid::regclass END, relkind::text,"
        " relkind = 'r' AND relpersistence = 'u' FROM pg_class JOIN tree ON oid = relid",
        full_name(sink.table),
        str(sink.table),
    ):
        if kind not in ("r", "p"):
            raise ConfigError(
                f"sink.table: {where} is {_KINDS.get(kind, 'not a table')}; rows and positions can be committed "
                "together only into a table",
                advice="Name a table.",
            )
        if unlogged:
            raise ConfigError(
                f"sink.table: {where} is UNLOGGED: a crash of the server would empty it, and leave the positions",
                advice="ALTER TABLE ... SET LOGGED makes it a table that keeps its rows.",
            )


def _check_rights(session: Session, sink: PostgresConfig, wanted: list[TableColumn]) -> None:
    """What every write would fail with, before anything is read."""
    ((user,),) = session.query("SELECT current_user::text")
    rights = {"append": ["INSERT"], "dedupe": ["INSERT", "SELECT"], "upsert": ["INSERT", "SELECT", "UPDATE", "DELETE"]}
    needed = rights[sink.mode]
    if "SELECT" not in needed and traits(session, sink.table).row_security:
        needed.append("SELECT")  # rows then go through a temporary table that is made like this one
    # As a value, not in the statement: a column may be called $1.
    names = json.dumps([column.name for column in wanted])
    missing = [
        right
        for right in needed
        if not session.query(
            # For all columns; DELETE is of the table.
            "SELECT has_table_privilege(to_regclass($1)::oid, $2)"
            + (
                ""
                if right == "DELETE"
                else " OR (SELECT bool_and(has_column_privilege(to_regclass($1)::oid, c, $2))"
                " FROM json_array_elements_text($3::json) AS v (c))"
            ),
            full_name(sink.table),
            right,
            names,
        )[0][0]
    ]
    if missing:
        raise ConfigError(
            f"user {user} lacks {', '.join(missing)} on table {sink.table}",
            advice=f"GRANT {', '.join(missing)} ON {full_name(sink.table)} TO {name(user)};",
        )
    if "SELECT" in needed and not session.query("SELECT has_database_privilege(current_database(), 'TEMP')")[0][0]:
        raise ConfigError(
            f"user {user} may not create temporary tables, which writing to table {sink.table} needs",
            advice=f"GRANT TEMPORARY ON DATABASE ... TO {name(user)};",
        )


def _refuse_differences(
    session: Session, sink: PostgresConfig, wanted: list[TableColumn], existing: dict[str, _Found]
) -> None:
    differences = [*_differences(wanted, existing, sink), *_key_differences(session, sink)]
    if differences:
        raise ConfigError(
            f"table {sink.table} does not fit this pipeline's rows:\n"
            + "\n".join(f"  {difference}" for difference in differences),
            advice=advice(differences, sink.evolve),
        )


def _differences(wanted: list[TableColumn], existing: dict[str, _Found], sink: PostgresConfig) -> Iterator[str]:
    evolves = sink.evolve == "add"
    for column in wanted:
        column_found = existing.get(column.name)
        if column_found is None:
            yield missing(column.name, column.type, existing, evolves=evolves, required=column.required)
        elif not column.takes(column_found.type, evolves=evolves):
            yield f"column {column.name!r} has type {column_found.type} instead of {column.type}"
        elif column_found.generated:
            yield f"column {column.name!r} is a generated column, which cannot be written"
        elif column_found.identity_always and sink.mode != "append":
            yield f"column {column.name!r} is GENERATED ALWAYS AS IDENTITY; {sink.mode} needs BY DEFAULT"
    ours = {column.name for column in wanted}
    for other, column_found in existing.items():
        if other not in ours and column_found.required and not column_found.fills_itself:
            yield _not_filled(other)


def _not_filled(column: str) -> str:
    return f"column {column!r} is NOT NULL without a default, but the pipeline does not write it"


def _key_differences(session: Session, sink: PostgresConfig) -> Iterator[str]:
    if not sink.key:
        return
    rows = session.query(
        "SELECT array_to_json(array_agg(a.attname::text))::text FROM pg_index i"
        " JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)"
        " WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL"
        " AND i.indexprs IS NULL AND i.indnkeyatts = i.indnatts GROUP BY i.indexrelid",
        full_name(sink.table),
    )
    if set(sink.key) not in [set(json.loads(row[0])) for row in rows]:
        yield f"{sink.mode} needs a unique index on exactly ({', '.join(sink.key)})"


@dataclass(frozen=True, slots=True)
class TableTraits:
    """What decides how rows go into the table, and which one it is."""

    oid: int
    row_security: bool  # policies apply to our user
    triggers: str  # the names of BEFORE triggers, which may discard a row without an error
    types: Mapping[str, str]  # of the columns
    required: frozenset[str]  # columns that are NOT NULL and have nothing that fills them

    @property
    def may_discard(self) -> bool:
        """Whether a row can be left out of the table without an error."""
        return self.row_security or bool(self.triggers)

    @property
    def lengths(self) -> dict[str, int]:
        """Of columns varchar(n)."""
        lengths = ((column, _VARCHAR.fullmatch(type_)) for column, type_ in self.types.items())
        return {column: int(match[1]) for column, match in lengths if match}


_VARCHAR = re.compile(r"character varying\((\d+)\)")


def lock(session: Session, table: Table) -> None:
    """Let nobody alter the table until the transaction ends, so that what ``traits`` then says stays true. Not within a
    savepoint: a rollback to it gives up the lock."""
    with as_sink_error(f"cannot write to table {table}"):
        target = full_name(table)
        ((whole,),) = session.query("SELECT has_table_privilege(to_regclass($1)::oid, 'INSERT')", target)
        # LOCK needs a right on the whole table. Where there are rights on columns, an INSERT that is only planned takes
        # the same lock.
        how = f"LOCK TABLE ONLY {target} IN ROW EXCLUSIVE MODE"
        session.run(how if whole else f"EXPLAIN INSERT INTO {target} DEFAULT VALUES")


def traits(session: Session, table: Table) -> TableTraits:
    ((oid, row_security, triggers, types, required),) = session.query(
        "WITH RECURSIVE tree (relid) AS (SELECT to_regclass($1)::oid"
        " UNION ALL SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = relid)"
        " SELECT to_regclass($1)::oid::bigint, coalesce(row_security_active(to_regclass($1)::oid), false),"
        " (SELECT coalesce(string_agg(DISTINCT tgname::text, ', '), '') FROM pg_trigger JOIN tree ON tgrelid = relid"
        " WHERE tgtype & 3 = 3 AND tgenabled IN ('O', 'A') AND NOT tgisinternal),"
        " coalesce(json_object_agg(attname, format_type(atttypid, atttypmod)), '{}')::text,"
        " coalesce(json_agg(attname) FILTER (WHERE attnotnull AND NOT atthasdef AND attidentity = ''), '[]')::text"
        " FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
        full_name(table),
    )
    return TableTraits(oid, row_security, triggers, json.loads(types), frozenset(json.loads(required)))


def encode(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Columns as the COPY needs them."""
    arrays = [_encode(rows.column(index)) for index in range(rows.num_columns)]
    return pa.RecordBatch.from_arrays(arrays, names=rows.schema.names)


def _encode(array: pa.Array) -> pa.Array:
    if pa.types.is_nested(array.type):
        texts = [None if value is None else _jsonb(value, array.type) for value in array.to_pylist()]
        return pa.array(texts, pa.string()).cast(pa.json_())
    return array


_ARROW = {arrow_type(scalar): type_ for scalar, type_ in _TYPES.items()} | {pa.json_(): "jsonb"}


def _our_type(type_: pa.DataType) -> str:
    if pa.types.is_decimal(type_):
        return f"numeric({type_.precision},{type_.scale})"
    return _ARROW.get(type_, str(type_))


_SENT_AS = {"integer": pa.int32(), "bigint": pa.int64(), "double precision": pa.float64()}


def widened(rows: pa.RecordBatch, traits: TableTraits) -> pa.RecordBatch:
    """Rows in the table's types, where another run of the pipeline has widened columns since this one declared them."""
    for number, field in enumerate(rows.schema):
        existing = traits.types.get(field.name, "")
        if existing in _WIDER.get(_our_type(field.type), ()):
            rows = rows.set_column(number, field.name, rows.column(number).cast(_SENT_AS[existing]))
    return rows


def check_types(schema: pa.Schema, table: Table, traits: TableTraits) -> None:
    """Refuse columns whose type was changed since the run began. Binary COPY converts nothing: bytes of another type
    are refused, row by row, or taken for another value."""
    for field in schema:
        type_, existing = _our_type(field.type), traits.types.get(field.name)
        if existing is None:
            raise ConfigError(
                f"table {table} has no column {field.name!r} ({type_})",
                advice="Run the pipeline: a run checks the table when it starts, and adds columns where sink.evolve = "
                '"add".',
            )
        if not TableColumn(field.name, type_, required=False).takes(existing):
            raise ConfigError(
                f"column {field.name!r} of table {table} now has type {existing} instead of {type_}",
                advice="Alter the column back, or restart the run: a run checks the table when it starts.",
            )


def check_required(schema: pa.Schema, table: Table, traits: TableTraits) -> None:
    """Refuse a column that must be filled, made so since the run began: every record would be a dead letter."""
    for column in sorted(traits.required - set(schema.names)):
        raise ConfigError(f"table {table}: {_not_filled(column)}", advice="Give it a default, or drop its NOT NULL.")


# A string, or -0 as a number of its own, which jsonb would take for 0.
_MINUS_ZERO = re.compile(
    r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?<![eE])(-0(?:\.0+)?(?:[eE][+-]?[0-9]+)?)(?=[,\]}\s]|\Z)', re.DOTALL
)


def _jsonb(value: Any, type_: pa.DataType) -> str:
    """A value as JSON text. One that jsonb cannot hold is a text that is no JSON: the server then refuses its row."""
    try:
        text = value_text(value, type_)
    except NotJson as error:
        return str(error)
    return _exact(text)


def _exact(text: str) -> str:
    lost = "-0" in text and any(match[1] for match in _MINUS_ZERO.finditer(text))
    return f"jsonb has no -0: {text}" if lost else text


def json_text(array: pa.Array) -> pa.Array:
    """A column of JSON text as PostgreSQL's jsonb takes it."""
    if pc.any(pc.match_substring(array, "-0")).as_py():
        array = pa.array([text and _exact(text) for text in array.to_pylist()], pa.string())
    return array.cast(pa.json_())
