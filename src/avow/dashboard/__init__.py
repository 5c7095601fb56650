"""The dashboard: a cluster and its pipelines as web pages, as JSON, and as metrics.

A page is a function from parameters to frozen values (``cluster``, ``messages``, ``pipelines``, ``evidence``,
``explained``). ``pages`` lists them all, each with its path; ``app`` serves every one twice, as a page by its template
and as JSON under ``/api``, and ``openapi`` describes them from the same list. Parameters are a pydantic model, so an
invalid request is refused before any work.

Answers are made in threads, with bounds on time, records and bytes: a slow broker gives an error page, not a hang.
Pipelines are sampled by a background thread (``watch``), so their pages show the last known state at once. Changes are
in ``changes``; audits and redrives run in worker processes (``jobs``). ``guard`` checks every request first.

Owns: the pages and access to them. Must not know: how records are delivered or judged.
"""
