"""Which schema registry a command asks, for those who look at records or write them.

Owns: these options. Must not know: what is asked. Neighbours: ``schema_registry`` (the settings) and ``kafka`` (the
same for the cluster).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from avow.cli import from_environment
from avow.errors import ConfigError
from avow.plan import load_checked
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.settings import Problem, from_options

registry_option = click.option(
    "--registry",
    envvar="AVOW_REGISTRY",
    metavar="URL",
    help="A schema registry, several URLs with commas.  [default: that of --pipeline, or of the local cluster]",
)
registry_settings_option = click.option(
    "--registry-setting",
    "registry_settings_",
    multiple=True,
    metavar="NAME=VALUE",
    help="A key of [decode.registry], such as user, password, token, ca_file; may be repeated. Give a secret as "
    "'${env:NAME}'.",
)


@dataclass(frozen=True)
class RegistrySelection:
    """Which registry: one by its URL, a pipeline's, or the local cluster's."""

    url: str | None
    settings: tuple[str, ...] = ()
    pipeline: Path | None = None
    folder: Path | None = None  # of the local cluster, where that is the one in use

    @property
    def is_given(self) -> bool:
        """By an option, and not only by the environment, a pipeline or the local cluster."""
        return bool(self.settings or (self.url and not from_environment("registry")))

    def found(self) -> RegistrySettings | None:
        """Its settings, or None where there is none."""
        given = dict(map(_split, self.settings))
        if self.url and not (self.pipeline and from_environment("registry")):
            return _settings({"url": self.url, **given})
        found = self._of_pipeline()
        if found is None and (url := self.url or self._local_url()):
            return _settings({"url": url, **given})
        if given:
            raise ConfigError(
                "--registry-setting is given without --registry",
                advice="Give --registry URL, or set the keys in [decode.registry] of the pipeline file.",
            )
        return found

    def _of_pipeline(self) -> RegistrySettings | None:
        from avow.formats.documents import registry_of

        return registry_of(load_checked(self.pipeline)) if self.pipeline else None

    def _local_url(self) -> str | None:
        from avow.local.cluster import Cluster

        local = Cluster(self.folder) if self.folder is not None else None
        return local.registry_url if local is not None and local.exists else None

    def client(self) -> SchemaRegistry | None:
        settings = self.found()
        return None if settings is None else SchemaRegistry(settings, key="--registry")


def _split(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(
            f"--registry-setting {name}: the value is missing", advice="Write --registry-setting NAME=VALUE."
        )
    return name, value


def _settings(document: dict[str, Any]) -> RegistrySettings:
    return from_options(RegistrySettings, document, _option)


def _option(problem: Problem) -> str:
    name = ".".join(map(str, problem.key))
    return "--registry" if name == "url" else f"--registry-setting {name}"


def registry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a ``RegistrySelection``, beside those of a cluster: the command gets it as ``registry``."""

    @wraps(command)
    def select(registry: str | None, registry_settings_: tuple[str, ...], **others: Any) -> Any:
        selection = others.get("selection")
        pipeline = selection.pipeline if selection else others.get("pipeline")
        brokers = selection.brokers if selection else others.get("brokers")
        folder = selection.folder if selection else others.get("folder")
        local = folder if pipeline is None and not brokers else None
        return command(registry=RegistrySelection(registry, registry_settings_, pipeline, local), **others)

    return registry_option(registry_settings_option(select))
