"""``[decode.registry]``: what it takes, what it refuses and in which words, and that no secret is ever shown."""

from __future__ import annotations

import pickle
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pydantic import Field

from avow import plugins, schema
from avow.errors import ConfigError, RegistryUnavailable, UnknownSchema
from avow.schema_registry import RegistrySettings, SchemaRegistry
from avow.settings import FormatConfig, PipelineConfig, load

NEEDLE = "hunter2"


class SchemaConfig(FormatConfig):
    """[decode] of a format that asks a registry."""

    format: Literal["by-registry"] = Field(description='"by-registry"')
    registry: RegistrySettings | None = Field(None, description="a table [decode.registry]")

    @property
    def columns(self) -> schema.Schema:
        return schema.parse("id long not null")


@pytest.fixture(autouse=True)
def _format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.FORMATS._own, "by-registry", "of this test")
    monkeypatch.setitem(plugins.FORMATS._loaded, "by-registry", SimpleNamespace(Config=SchemaConfig))


def pipeline(folder: Path, lines: str, **env: str) -> PipelineConfig:
    path = folder / "p.toml"
    path.write_text(
        'name = "p"\nguarantee = "exactly-once"\n[source]\nbrokers = "localhost:9092"\ntopics = ["t"]\n'
        '[sink]\nkind = "delta"\npath = "t"\n[decode]\nformat = "by-registry"\n[decode.registry]\n' + lines
    )
    return load(path, env)


def registry(folder: Path, lines: str, **env: str) -> RegistrySettings:
    decode = pipeline(folder, lines, **env).decode
    assert isinstance(decode, SchemaConfig)
    assert decode.registry
    return decode.registry


def test_everything_that_can_be_set(tmp_path: Path) -> None:
    found = registry(
        tmp_path,
        'url = "https://one:8081/, http://two/apis/ccompat/v7"\nuser = "me"\npassword = "${env:SECRET}"\n'
        'ca_file = "ca.pem"\ncertificate_file = "me.pem"\nkey_file = "me.key"\nkey_password = "${env:SECRET}"\n'
        'timeout = "250ms"\nsubject_strategy = "topic-record"\n',
        SECRET=NEEDLE,
    )
    assert found.urls == ("https://one:8081", "http://two/apis/ccompat/v7")
    assert found.timeout == timedelta(milliseconds=250)
    assert NEEDLE not in f"{found!r} {found} {found.model_dump()} {found.model_dump_json()}"
    assert pickle.loads(pickle.dumps(found)).password.get_secret_value() == NEEDLE


def test_the_subject_of_each_strategy(tmp_path: Path) -> None:
    def subjects(lines: str) -> tuple[str, str]:
        found = registry(tmp_path, f'url = "http://r"\n{lines}')
        return found.subject_of("t", "shop.Order"), found.subject_of("t", "shop.OrderKey", key=True)

    assert subjects("") == ("t-value", "t-key")
    assert subjects('subject_strategy = "record"') == ("shop.Order", "shop.OrderKey")
    assert subjects('subject_strategy = "topic-record"') == ("t-shop.Order", "t-shop.OrderKey")
    assert subjects('subject = "orders"') == ("orders", "t-key")


REFUSED = {
    "no url": ("", "decode.registry.url: is missing; http://host:port or https://host:port"),
    "not http": ('url = "ftp://r"', "decode.registry.url: entry 1 is not an http or https URL"),
    "no host": ('url = "http://r,http://:80"', "decode.registry.url: entry 2 is not an http or https URL"),
    "bad port": ('url = "http://r:99999"', "decode.registry.url: entry 1 is not an http or https URL"),
    "empty entry": ('url = "http://r,"', "decode.registry.url: entry 2 is not an http or https URL"),
    "line feed": ('url = "http://r/\\na"', "decode.registry.url: entry 1 is not an http or https URL"),
    "user in url": (f'url = "http://me:{NEEDLE}@r"', "decode.registry.url: entry 1 contains a user"),
    "question mark": ('url = "http://r/?a=b"', "decode.registry.url: entry 1 contains ? or #"),
    "user alone": ('url = "http://r"\nuser = "me"', "decode.registry.user: is set without password"),
    "password alone": (f'url = "http://r"\npassword = "{NEEDLE}"', "decode.registry.password: is set without user"),
    "colon": ('url = "http://r"\nuser = "a:b"\npassword = "x"', "decode.registry.user: contains a colon"),
    "both": (
        f'url = "http://r"\nuser = "me"\npassword = "x"\ntoken = "{NEEDLE}"',
        "decode.registry.token: is set together with user and password",
    ),
    "token of two lines": (
        f'url = "http://r"\ntoken = "a\\r\\n{NEEDLE}: b"',
        "decode.registry.token: is not a bearer token",
    ),
    "key alone": ('url = "https://r"\nkey_file = "k"', "decode.registry.key_file: is set without certificate_file"),
    "ca without https": ('url = "http://r"\nca_file = "c"', "decode.registry.ca_file: is set, but no url begins with"),
    "climbing": ('url = "https://r"\nca_file = "../c"', "decode.registry.ca_file: contains .."),
    "no time": ('url = "http://r"\ntimeout = "0s"', "decode.registry.timeout: is zero"),
    "not a time": ('url = "http://r"\ntimeout = 5', "decode.registry.timeout: 5 is not a duration"),
    "strategy": ('url = "http://r"\nsubject_strategy = "topc"', "'topc' is not known, did you mean topic?"),
    "two subjects": (
        'url = "http://r"\nsubject = "s"\nsubject_strategy = "topic"',
        "decode.registry.subject_strategy: is set together with subject",
    ),
    "unknown": ('url = "http://r"\npasword = "x"', "decode.registry.pasword: is not a known key, did you mean pass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_sentence(case: str, tmp_path: Path) -> None:
    lines, expected = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        pipeline(tmp_path, lines)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert NEEDLE not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", ["password", "token", "key_password"])
def test_a_secret_in_the_file_is_warned_of(key: str, tmp_path: Path) -> None:
    other = {"password": 'user = "me"', "token": "", "key_password": 'certificate_file = "c"'}[key]
    lines = f'url = "https://r"\n{other}\n{key} = '
    assert pipeline(tmp_path, f'{lines}"{NEEDLE}"').secrets_in_file == (f"decode.registry.{key}",)
    assert pipeline(tmp_path, f'{lines}"${{env:SECRET}}"', SECRET=NEEDLE).secrets_in_file == ()


def errors_of(client: SchemaRegistry) -> str:
    with pytest.raises(RegistryUnavailable) as caught:
        client.latest("t-value")
    return "".join(traceback.format_exception(caught.value)) + caught.value.advice


def test_no_error_shows_what_came_from_the_environment(tmp_path: Path) -> None:
    lines = 'url = "${env:URL}"\nuser = "me"\npassword = "${env:SECRET}"'
    client = SchemaRegistry(registry(tmp_path, lines, URL=f"http://{NEEDLE}.invalid:9", SECRET=NEEDLE))
    assert "the schema registry at ${env:URL} cannot be asked" in errors_of(client)
    assert NEEDLE not in errors_of(client) + str(client) + repr(client)


def test_an_id_that_no_registry_has_is_not_asked_for(tmp_path: Path) -> None:
    client = SchemaRegistry(registry(tmp_path, 'url = "http://127.0.0.1:9"'))
    for impossible in (-1, 2**31):
        with pytest.raises(UnknownSchema, match=f"no schema with id {impossible}"):
            client.by_id(impossible)


@pytest.mark.parametrize("missing", ["ca_file", "certificate_file"])
def test_certificates_that_are_not_there(missing: str, tmp_path: Path) -> None:
    client = SchemaRegistry(registry(tmp_path, f'url = "https://127.0.0.1:9"\n{missing} = "{tmp_path}/none.pem"'))
    with pytest.raises(ConfigError, match=r"decode.registry: there is no such file") as caught:
        client.subjects()
    assert f"{missing} = {tmp_path}/none.pem" in caught.value.advice


def test_it_travels_to_other_processes() -> None:
    settings: dict[str, Any] = {"url": "http://127.0.0.1:9", "user": "me", "password": NEEDLE}
    client = pickle.loads(pickle.dumps(SchemaRegistry(RegistrySettings.model_validate(settings), key="--registry")))
    assert "127.0.0.1:9" in str(client)
    assert "--registry.url" in errors_of(client)
