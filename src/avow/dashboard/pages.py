"""Every page: its path, the function that answers it, and the template that shows the answer.

The same list is the JSON API (each under ``/api``) and what ``openapi`` describes.

Owns: the list. Must not know: how a request comes in; its neighbour is ``app``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from avow.dashboard import cluster, evidence, explained, messages, pipelines
from avow.dashboard.requests import Params
from avow.dashboard.state import AppState


@dataclass(frozen=True, slots=True)
class Page:
    path: str
    answer: Callable[[AppState, Any], Any]
    title: str  # with {names} of the path
    nav: str  # which entry of the menu it belongs to
    template: str

    @property
    def params(self) -> type[Params]:
        model: type[Params] = list(_hints(self.answer).values())[-2]
        return model

    @property
    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(_hints(self.answer)["return"])


@cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    # Modules that must not import the app state at run time get its name here.
    return get_type_hints(function, localns={"AppState": AppState})


PAGES = (
    Page("/pipelines", pipelines.pipelines, "Pipelines", "pipelines", "pipelines.html"),
    Page("/pipelines/{name}", pipelines.pipeline, "{name}", "pipelines", "pipeline.html"),
    Page("/pipelines/{name}/claims", pipelines.claims, "Claims of {name}", "pipelines", "claims.html"),
    Page("/pipelines/{name}/charts", pipelines.charts, "Charts of {name}", "pipelines", ""),
    Page(
        "/pipelines/{name}/dead-letters",
        pipelines.dead_letters,
        "Dead letters of {name}",
        "pipelines",
        "dead_letters.html",
    ),
    Page(
        "/pipelines/{name}/dead-letters/{topic}/{partition}/{offset}",
        pipelines.dead_letter,
        "Dead letter {topic}/{partition} {offset}",
        "pipelines",
        "dead_letter.html",
    ),
    Page("/pipelines/{name}/receipt", pipelines.receipt, "Find a record", "pipelines", "receipt.html"),
    Page("/jobs/{number}", pipelines.job, "Job {number}", "pipelines", "job.html"),
    Page("/cluster", cluster.cluster, "Cluster", "cluster", "cluster.html"),
    Page("/topics", cluster.topics, "Topics", "topics", "topics.html"),
    Page("/topics/{topic}", cluster.topic, "{topic}", "topics", "topic.html"),
    Page("/topics/{topic}/groups", cluster.topic_groups, "Groups of {topic}", "topics", "topic_groups.html"),
    Page("/topics/{topic}/messages", messages.messages, "Messages of {topic}", "topics", "messages.html"),
    Page(
        "/topics/{topic}/messages/{partition}/{offset}",
        messages.message,
        "{topic}/{partition} offset {offset}",
        "topics",
        "message.html",
    ),
    Page("/groups", cluster.groups, "Groups", "groups", "groups.html"),
    Page("/groups/{group}", cluster.group, "{group}", "groups", "group.html"),
    Page("/transactions", cluster.transactions, "Transactions", "transactions", "transactions.html"),
    Page("/evidence", evidence.evidence, "Evidence", "evidence", "evidence.html"),
    Page("/evidence/proofs/{id}", evidence.proof, "Proof", "evidence", "proof.html"),
    Page("/evidence/audits/{id}", evidence.audit, "Audit", "evidence", "audit.html"),
    Page("/explained", explained.explained, "Guarantees, explained", "explained", "explained.html"),
)

# Not a question with an answer: what loads the live part.
TAIL = Page("/topics/{topic}/messages/tail", messages.tail_page, "Tail", "topics", "tail.html")

# The menu: the name of an entry, its path, its words, and the second key of its shortcut (g, then this one).
MENU = (
    ("pipelines", "/pipelines", "Pipelines", "p"),
    ("cluster", "/cluster", "Cluster", "c"),
    ("topics", "/topics", "Topics", "t"),
    ("groups", "/groups", "Groups", "r"),
    ("transactions", "/transactions", "Transactions", "x"),
    ("evidence", "/evidence", "Evidence", "e"),
    ("explained", "/explained", "Explained", "w"),
    ("api", "/api", "API", "a"),
)
