"""Which terms a consumer may declare, and what they are said to mean."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from avow.cli import main
from avow.clients.terms import Terms, checked, explain
from avow.errors import ConfigError


def terms(guarantee: str = "at-least-once", commit: str | None = None, **given: Any) -> Terms:
    usual: dict[str, Any] = {
        "per": "batch",
        "on_failure": "stop",
        "retries": None,
        "back_off_s": 0.1,
        "commit_interval_s": 5.0,
        "assignment": "cooperative",
        "max_records": 500,
        "longest_s": 3600.0,
        "database": False,
    }
    return checked(guarantee, commit, **(usual | given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guarantee": "once"}, "'once' is not known"),
        ({"guarantee": "at-most-once", "commit": "async"}, "cannot keep at-most-once"),
        ({"guarantee": "at-most-once", "commit": "auto"}, "cannot keep at-most-once"),
        ({"guarantee": "exactly-once"}, "needs a database"),
        ({"guarantee": "exactly-once", "commit": "auto", "database": True}, "cannot keep exactly-once"),
        ({"database": True}, "keeps its positions in the Kafka group"),
        ({"per": "hour"}, "'hour' is not known"),
        ({"commit": "later"}, "'later' is not known"),
        ({"retries": -1}, "out of range"),
        ({"longest_s": 10.0}, "out of range"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        terms(**given)


def test_the_default_commit_fits_the_guarantee() -> None:
    assert terms("at-most-once").commit == "sync"
    assert terms("at-least-once").commit == "auto"
    assert terms("at-most-once").claims_first
    assert not terms("at-least-once").claims_first
    assert terms("exactly-once", database=True).in_one_act


def test_a_handler_that_failed_is_not_tried_again_where_that_could_do_its_work_twice() -> None:
    assert terms("at-most-once").retries == 0
    assert terms("at-least-once").retries == terms("exactly-once", database=True).retries == 3
    assert "A record whose handler fails is not tried again: the consumer stops" in "".join(
        explain(terms("at-most-once"))
    )
    declared = terms("at-most-once", retries=2)
    assert declared.retries == 2
    assert any("does it again" in line for line in explain(declared))
    assert not any("does it again" in line for line in explain(terms(retries=2)))


@pytest.mark.parametrize("guarantee", ["at-most-once", "at-least-once", "exactly-once"])
@pytest.mark.parametrize("on_failure", ["stop", "dead-letter"])
def test_they_are_explained(guarantee: str, on_failure: str) -> None:
    lines = explain(terms(guarantee, on_failure=on_failure, database=guarantee == "exactly-once", per="record"))
    assert lines[0].startswith(guarantee)
    assert any(("stops" if on_failure == "stop" else "dead letter") in line for line in lines)


def test_the_command_explains_without_touching_anything() -> None:
    said = CliRunner().invoke(main, ["consume", "t", "--guarantee", "at-most-once", "--explain"])
    assert said.exit_code == 0
    assert "before the handler sees it" in said.output
    # Where errors of ours are shown by `main`, the exit code is theirs.
    refused = CliRunner().invoke(main, ["consume", "t", "--guarantee", "exactly-once", "--explain"])
    assert refused.exit_code == 2
    refused = CliRunner().invoke(main, ["consume", "t", "--guarantee", "at-most-once", "--commit", "auto", "--explain"])
    assert refused.exit_code == 2
