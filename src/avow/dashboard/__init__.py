"""The dashboard: a cluster and its pipelines as web pages, as JSON, and as metrics.

Theory of operation
-------------------
A page is a function that answers a question with frozen values (``cluster``, ``messages``, ``pipelines``, ``evidence``,
``explained``). ``pages`` lists them all, each with its path; ``app`` serves every one twice, as a page by its template
and as JSON under ``/api``, and ``openapi`` describes them from the same list. What a page can be asked is a pydantic
model, so that a bad question is refused before any work.

Answers are made in threads, each with a bound of time, records and bytes: a slow broker gives a page that says so.
Pipelines are looked at by a thread of their own (``watch``), so that their pages show at once what was seen last.
Changes are in ``changes``, and long work is done by child processes (``jobs``). ``guard`` stands before all of it.

Owns: looks, and who may ask. Must not know: how records are delivered or judged; it asks those who do.
"""
