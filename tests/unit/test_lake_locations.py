"""Where a lake's files are: the spellings of other writers, and what the clients of a store are told."""

from __future__ import annotations

import pickle

import pytest

from avow.errors import ConfigError
from avow.sinks.lake.files import Location, location_of, path_of


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/lake/t", "/lake/t"),
        ("lake/t", "lake/t"),
        ("file:///lake/t", "/lake/t"),
        ("file:/lake/t", "/lake/t"),
        ("s3://bucket/t", "bucket/t"),
        ("s3a://bucket/a=file:x", "bucket/a=file:x"),
    ],
)
def test_the_path_of_what_any_writer_has_named(url: str, path: str) -> None:
    assert path_of(url) == path


@pytest.mark.parametrize("url", ["gs://bucket/t", "abfss://c@account.dfs.core.windows.net/t", "hdfs:/t"])
def test_a_store_that_is_not_known_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"the storage scheme {url.partition(':')[0]}"):
        path_of(url)


@pytest.mark.parametrize("prefix", ["", "aws_", "AWS_"])
def test_both_clients_of_a_store_are_told_the_same(prefix: str) -> None:
    options = {
        "access_key_id": "someone",
        "secret_access_key": "hunter2",
        "token": "t",
        "endpoint": "http://127.0.0.1:1",
        "region": "eu-central-1",
        "virtual_hosted_style_request": "true",
        "allow_http": "true",
    }
    found = location_of("s3a://bucket/t", {prefix + name: value for name, value in options.items()})
    assert found.url == "s3://bucket/t"
    assert "hunter2" not in repr(found)
    again: Location = pickle.loads(pickle.dumps(found))
    (_, (told,)) = again.filesystem.__reduce__()
    assert (told["access_key"], told["secret_key"], told["session_token"]) == ("someone", "hunter2", "t")
    assert (told["endpoint_override"], told["region"]) == ("http://127.0.0.1:1", "eu-central-1")
    assert told["force_virtual_addressing"] is True
    assert again.filesystem is found.filesystem, "one client for all tasks of a process"
