"""Records that a schema registry has a schema for, decoded for pages.

Whose registry it is: that of a pipeline that reads the topic, else the one that the dashboard was started with, else
the only one that pipelines have. Ids mean something in their own registry alone, so where several would do, none is
asked.

A page never waits long for a registry and never fails by one: each look has a bound in time, a registry that gave no
answer is left alone for a few seconds, and what is not decoded is shown as it is, with the reason.

Owns: these bounds, and the choice. Must not know: how a value is shown, any format. Neighbour:
``avow.formats.documents``, which reads values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from avow.dashboard.watch import Watch
from avow.errors import AvowError, RegistryRefused, RegistryUnavailable
from avow.formats.documents import Document, Documents, Undecoded, framed_id, registry_of
from avow.schema_registry import RegistrySettings, SchemaRegistry

VALUE_BYTES_MAX = 4 << 20  # a larger value is shown as it is
LEFT_ALONE_S = 5.0  # a registry that gave no answer
NOT_ASKED = "not-decoded"  # the reason: nothing is wrong with the record


class Schemas:
    """The registries of one dashboard."""

    def __init__(self, given: RegistrySettings | None, watch: Watch, timeout_s: float) -> None:
        self._given, self._watch, self._timeout_s = given, watch, timeout_s
        self._opened: dict[RegistrySettings, _Registry] = {}

    def look(self, topic: str) -> Look:
        """For the values of one page."""
        settings = self._of(topic)
        if settings is None:
            return Look(None, 0.0)
        if settings not in self._opened:
            timeout = min(settings.timeout, timedelta(seconds=self._timeout_s / 4))
            self._opened[settings] = _Registry(settings.model_copy(update={"timeout": timeout}))
        return Look(self._opened[settings], time.monotonic() + self._timeout_s / 2)

    def _of(self, topic: str) -> RegistrySettings | None:
        known = [
            (watched, settings)
            for watched in self._watch.pipelines()
            if watched.pipeline is not None and (settings := registry_of(watched.pipeline))
        ]
        for watched, settings in known:
            if topic in watched.reads:
                return settings
        if self._given is not None or not known:
            return self._given
        return known[0][1] if len({settings.url for _, settings in known}) == 1 else None


class _Registry:
    """One registry, and what came of the last request."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.client = SchemaRegistry(settings)
        self.documents = Documents(self.client)
        self.left_alone_until = 0.0
        self.problem = ""

    def failed(self, error: AvowError) -> None:
        if isinstance(error, RegistryUnavailable | RegistryRefused):
            self.problem, self.left_alone_until = str(error), time.monotonic() + LEFT_ALONE_S


class Look:
    """Decodes the values of one page, as far as its time goes."""

    def __init__(self, registry: _Registry | None, until: float) -> None:
        self._registry, self._until = registry, until

    def read(self, data: bytes | None) -> Document | Undecoded | None:
        """None: the value does not begin with a schema's id, or there is no registry."""
        schema_id = framed_id(data)
        if self._registry is None or data is None or schema_id is None:
            return None
        if len(data) > VALUE_BYTES_MAX:
            return Undecoded(schema_id, NOT_ASKED, f"values of more than {VALUE_BYTES_MAX >> 20} MiB are not decoded")
        if time.monotonic() > self._until:
            return Undecoded(schema_id, NOT_ASKED, "the time for this page is over; look at the record by itself")
        known = self._registry.client.knows(schema_id)
        if not known and time.monotonic() < self._registry.left_alone_until:
            return Undecoded(schema_id, NOT_ASKED, self._registry.problem)
        try:
            return self._registry.documents.read(data)
        except AvowError as error:
            self._registry.failed(error)
            return Undecoded(schema_id, NOT_ASKED, str(error))

    def subjects(self, schema_id: int) -> Sequence[str]:
        """The subjects that have the schema, if the registry says so in time."""
        registry = self._registry
        if registry is None or not registry.left_alone_until < time.monotonic() < self._until:
            return ()
        try:
            return [f"{subject} version {version}" for subject, version in registry.client.subjects_of(schema_id)]
        except AvowError as error:
            registry.failed(error)
            return ()
