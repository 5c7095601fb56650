"""Plugins by the word that a pipeline file has for them: ``decode.format`` and ``sink.kind``.

avow's own are in the tables below, and those of other packages are entry points of the groups ``avow.formats`` and
``avow.sinks``. Tables and not entry points for our own: they are then found wherever the package is, also where it has
no installed metadata (a source tree, a zip file on Spark's executors), and no command reads the metadata of every
installed package to find them. An entry point does not take the place of one of ours.

A plugin's module is imported when it is asked for, and must not import the client that it works with: ``avow plan`` and
the reading of a pipeline file need none.

Owns: finding them. Must not know: what a plugin is. Neighbours: ``settings`` (which reads ``[decode]`` and ``[sink]``
by the plugins' ``Config``), ``formats`` and ``sinks`` (which open them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from typing import Any

from avow import extras
from avow.errors import ConfigError


class Registry(Mapping[str, Any]):
    """Plugins of one group by name; each is imported when it is asked for."""

    def __init__(self, group: str, own: Mapping[str, str]) -> None:
        self._group, self._own = group, dict(own)
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            place = self._own.get(name) or _entry_points(self._group)[name]
            self._loaded[name] = load(place, f"{self._group} {name!r}")
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in _entry_points(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own | _entry_points(self._group))

    def __len__(self) -> int:
        return len(self._own | _entry_points(self._group))

    def forget(self) -> None:
        """Plugins of other packages are looked up anew."""
        self._loaded = {name: plugin for name, plugin in self._loaded.items() if name in self._own}


@cache
def _entry_points(group: str) -> dict[str, str]:
    return {point.name: point.value for point in sorted(metadata.entry_points(group=group))}


def load(place: str, what: str) -> Any:
    """What ``MODULE:NAME`` names."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = extras.missing(error.name) if isinstance(error, ModuleNotFoundError) else None
        advice = missing.advice if missing else "Install its dependencies, or uninstall the package that provides it."
        raise ConfigError(f"the plugin {what} cannot be loaded from {place}: {error}", advice=advice) from error


FORMATS = Registry(
    "avow.formats",
    {
        "avro": "avow.formats.avro.plugin:AVRO",
        "debezium": "avow.formats.debezium.plugin:DEBEZIUM",
        "json": "avow.formats.json.plugin:JSON",
        "json-schema": "avow.formats.json_schema.plugin:JSON_SCHEMA",
        "protobuf": "avow.formats.protobuf.plugin:PROTOBUF",
        "raw": "avow.formats.raw.plugin:RAW",
        "string": "avow.formats.raw.plugin:STRING",
    },
)

SINKS = Registry(
    "avow.sinks",
    {
        "postgres": "avow.sinks.postgres.plugin:POSTGRES",
        "delta": "avow.sinks.delta.plugin:DELTA",
        "iceberg": "avow.sinks.iceberg.plugin:ICEBERG",
        "kafka": "avow.sinks.kafka.plugin:KAFKA",
    },
)


def forget() -> None:
    """What is installed has changed."""
    _entry_points.cache_clear()
    for registry in (FORMATS, SINKS):
        registry.forget()
