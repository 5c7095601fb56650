"""The web application: requests to questions, answers to pages, JSON and streams.

Theory of operation
-------------------
A question is made of the path and the query, checked by its model, and answered in a thread. What a thread does has its
own bounds; if it still takes too long, the page says so and the thread is left to end by itself. Threads are few and
stay few: one that was left is not replaced before it ends, and whoever finds none free in time is told the same.

Live parts are server-sent events that carry a piece of HTML each, rendered by the same templates as the page.

Owns: HTTP. Must not know: what any page is about. Neighbours: ``pages`` (the list), ``guard`` (who may ask).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from avow.dashboard import explained, messages, metrics, openapi, pipelines
from avow.dashboard.asking import Ask, Nothing, NotThere
from avow.dashboard.changes import CHANGES
from avow.dashboard.guard import LOGIN, Guard, cookie_of
from avow.dashboard.house import PAGE, House
from avow.dashboard.pages import MENU, PAGES, TAIL, Page
from avow.dashboard.show import HERE, environment
from avow.errors import AvowError, ConfigError

Answer = TypeVar("Answer")

THREADS = 24  # that answer questions; whoever follows a topic has another
STREAMS_MAX = 40  # live parts at once
LIVE_S = 2.0
STREAM_MAX_S = 30 * 60  # a browser connects again by itself
TAIL_ROWS = 100  # in one event; more are counted
FORM_BYTES_MAX = 64 * 1024
FIELDS_MAX = 50  # of a form
STATIC_AGE_S = 3600


class Slow(AvowError):
    """It took too long."""


class App:
    """The handlers. ``make`` puts them together."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._templates = environment()
        self._templates.globals |= {
            "menu": MENU,
            "version": version("avow"),
            "read_only": house.rules.read_only,
            "csrf": house.rules.form,
            "locked": house.rules.token is not None,
            "words": explained.WORDS,
        }
        # Not anyio's limit: that one counts those who wait, not the threads that they have stopped waiting for.
        self._threads = ThreadPoolExecutor(THREADS, "avow-answer")
        self._tails = anyio.CapacityLimiter(STREAMS_MAX)
        self._streams = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Threads

    async def _in_thread(self, function: Callable[..., Answer], *given: Any) -> Answer:
        patience_s = PAGE * self._house.timeout_s
        begun = asyncio.wrap_future(self._threads.submit(function, *given))
        try:
            return await asyncio.wait_for(begun, patience_s)
        except TimeoutError:
            raise Slow(
                f"there was no answer within {patience_s:g} s",
                advice="Kafka or the sink is slow or out of reach. Try again; `avow status` and `avow lag` look too.",
            ) from None

    # Pages

    def page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            began = time.monotonic()
            ask = page.ask.model_validate({**request.query_params, **request.path_params})
            answer = await self._in_thread(page.answer, self._house, ask)
            title = page.title.format(**request.path_params)
            body = self._render(page.template, title=title, nav=page.nav, answer=answer, ask=ask, whole=page.whole)
            took_ms = (time.monotonic() - began) * 1000
            return HTMLResponse(body, headers={"Server-Timing": f"app;dur={took_ms:.1f}"})

        return show

    def api(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        adapter = page.adapter

        async def tell(request: Request) -> Response:
            began = time.monotonic()
            ask = page.ask.model_validate({**request.query_params, **request.path_params})
            answer = await self._in_thread(page.answer, self._house, ask)
            took_ms = (time.monotonic() - began) * 1000
            return Response(
                adapter.dump_json(answer),
                media_type="application/json",
                headers={"Server-Timing": f"app;dur={took_ms:.1f}"},
            )

        return tell

    def _render(self, template: str, **context: Any) -> str:
        return self._templates.get_template(template).render(**context)

    async def home(self, _: Request) -> Response:
        there = self._house.watch.pipelines() or not self._house.has_source
        return RedirectResponse("/pipelines" if there else "/cluster", 303)

    async def api_page(self, _: Request) -> Response:
        return HTMLResponse(self._render("api.html", title="API", nav="api", document=openapi.document(), whole=True))

    async def api_document(self, _: Request) -> Response:
        return JSONResponse(openapi.document())

    async def metrics(self, _: Request) -> Response:
        text = await self._in_thread(metrics.text, self._house)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # Files to save

    async def value(self, request: Request) -> Response:
        ask = messages.MessageAsk.model_validate(request.path_params)
        data = await self._in_thread(messages.value_bytes, self._house, ask)
        return _attachment(iter([data]), f"{ask.topic}-{ask.partition}-{ask.offset}.bin")

    async def export(self, request: Request) -> Response:
        ask = messages.MessagesAsk.model_validate({**request.query_params, **request.path_params})
        # Read before the answer begins, so that what goes wrong can still be told.
        lines = await self._in_thread(lambda: list(messages.export(self._house, ask)))
        return _attachment(iter(lines), f"{ask.topic}.jsonl")

    # Changes

    def change(self, ask: type[Ask], make: Callable[..., str]) -> Callable[[Request], Awaitable[Response]]:
        async def changed(request: Request) -> Response:
            form = await _form(request)
            if not self._house.rules.form_is(form.pop("csrf", "")):
                raise HTTPException(
                    403, "The form is not one of this dashboard's, or it was restarted. Reload the page."
                )
            question = ask.model_validate({**form, **request.path_params})
            return RedirectResponse(await self._in_thread(make, self._house, question), 303)

        return changed

    async def login(self, request: Request) -> Response:
        rules = self._house.rules
        onwards = request.query_params.get("next", "/")
        if not onwards.startswith("/") or onwards.startswith(("//", "/\\")):
            onwards = "/"
        if request.method != "POST":
            return HTMLResponse(
                self._render("login.html", title="Token", nav="", next=onwards, wrong=False, whole=True)
            )
        form = await _form(request)
        if not rules.token_is(form.get("token", "")):
            await asyncio.sleep(0.5)  # whoever guesses is slowed down
            body = self._render("login.html", title="Token", nav="", next=onwards, wrong=True, whole=True)
            return HTMLResponse(body, 403)
        answer = RedirectResponse(onwards, 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(cookie_of(request.scope), rules.session, httponly=True, samesite="strict", secure=secure)
        return answer

    # Live parts

    def live(
        self, template: str, answer: Callable[[House, Any], Any], ask: type[Ask], ended: Callable[[Any], bool]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A piece of HTML, again whenever it has changed."""

        async def events(question: Ask) -> AsyncIterator[str]:
            last = None
            until = time.monotonic() + STREAM_MAX_S
            while time.monotonic() < until and not self._house.closing.is_set():
                try:
                    found = await self._in_thread(answer, self._house, question)
                    body, over = self._render(template, answer=found), ended(found)
                except AvowError as error:
                    body, over = self._render("problem_part.html", problem=str(error), advice=error.advice), False
                yield _event("part", body) if body != last else ": nothing new\n\n"
                last = body
                if over:
                    yield _event("over", "over")
                    return
                await self._rest()

        async def stream(request: Request) -> Response:
            return self._stream(events(ask.model_validate({**request.query_params, **request.path_params})))

        return stream

    async def _rest(self) -> None:
        """Until the next look, or the end of the server."""
        until = time.monotonic() + LIVE_S
        while time.monotonic() < until and not self._house.closing.is_set():
            await asyncio.sleep(LIVE_S / 10)

    async def tail(self, request: Request) -> Response:
        given = {**request.query_params, **request.path_params}
        if since := request.headers.get("last-event-id"):  # of a browser that connects again by itself
            given["onwards"] = since
        return self._stream(self._tailed(messages.TailAsk.model_validate(given)))

    async def _tailed(self, ask: messages.TailAsk) -> AsyncIterator[str]:
        until = time.monotonic() + STREAM_MAX_S
        closing = self._house.closing
        rows = messages.tail(self._house, ask, lambda: time.monotonic() > until or closing.is_set())
        quiet = _event("place", "place")  # once, so that the browser knows where it stands; then nothing
        try:
            while (told := await anyio.to_thread.run_sync(next, rows, None, limiter=self._tails)) is not None:
                some, cursor = told
                shown = some[-TAIL_ROWS:]
                body = self._render("tail_rows.html", rows=shown, left_out=len(some) - len(shown)) if some else ""
                yield f"id: {cursor}\n" + (_event("rows", body) if some else quiet)
                quiet = ": nothing new\n\n"
        except AvowError as error:
            yield _event("rows", self._render("tail_problem.html", problem=str(error), advice=error.advice))
            yield _event("over", "over")  # else the browser would connect again, to the same problem
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(rows.close, limiter=self._tails)  # type: ignore[attr-defined]

    def _stream(self, events: AsyncIterator[str]) -> Response:
        if self._streams >= STREAMS_MAX:
            return PlainTextResponse("Too many live pages are open.\n", 503, {"Retry-After": "10"})

        async def counted() -> AsyncIterator[str]:
            self._streams += 1
            try:
                async for event in events:
                    yield event
            finally:
                self._streams -= 1

        return StreamingResponse(counted(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    # What goes wrong

    async def failed(self, request: Request, error: Exception) -> Response:
        status, problem, advice = _told(error)
        path = request.url.path
        if path.startswith("/api/"):
            return JSONResponse({"problem": problem, "advice": advice}, status)
        context = {"problem": problem, "advice": advice}
        if request.headers.get("hx-request"):
            # htmx shows what comes with 200 only; that it failed is said in words.
            return HTMLResponse(self._render("problem_part.html", **context))
        nav = next((page.nav for page in PAGES if path.startswith(f"/{page.nav}")), "")
        body = self._render(
            "problem.html", title="Something is not right", nav=nav, status=status, whole=True, **context
        )
        return HTMLResponse(body, status)


def _told(error: Exception) -> tuple[int, str, str]:
    """Status, problem and advice."""
    match error:
        case HTTPException():
            return error.status_code, error.detail or "refused", ""
        case ValidationError():
            found = [
                ": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, "))))
                for one in error.errors()[:5]
            ]
            return 400, f"the question is not a good one: {'; '.join(found)}", ""
        case NotThere():
            return 404, str(error), error.advice
        case Slow():
            return 504, str(error), error.advice
        case ConfigError():
            return 409, str(error), error.advice
        case AvowError():
            return 502, str(error), error.advice
        case _:
            return 500, "a bug of ours: the log of avow dashboard has more", ""


def _attachment(data: Iterator[bytes], name: str) -> Response:
    """Never shown by a browser, always saved."""
    return StreamingResponse(
        data,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _event(name: str, body: str) -> str:
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in body.splitlines()) + "\n"


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES_MAX:
            raise HTTPException(413, "The form is too large.")
    try:
        return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:
        raise HTTPException(400, f"The form has more than {FIELDS_MAX} fields.") from None


class Files(StaticFiles):
    """Our own files, which a browser may keep for a while."""

    def file_response(self, *given: Any, **more: Any) -> Response:
        answer = super().file_response(*given, **more)
        answer.headers["Cache-Control"] = f"max-age={STATIC_AGE_S}"
        return answer


def make(house: House) -> ASGIApp:
    """The whole application, with the guard before it."""
    app = App(house)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        house.watch.start()
        try:
            yield
        finally:
            app.close()
            await anyio.to_thread.run_sync(house.close)

    def never(_: Any) -> bool:
        return False

    routes: list[Route | Mount] = [
        Route("/", app.home),
        Route("/api", app.api_page),
        Route("/api/openapi.json", app.api_document),
        Route("/metrics", app.metrics),
        Route(LOGIN, app.login, methods=["GET", "POST"]),
        Mount("/static", Files(directory=HERE / "static")),
        Route("/live/pipelines", app.live("pipelines_part.html", pipelines.pipelines, Nothing, never)),
        Route("/live/pipelines/{name}", app.live("pipeline_part.html", pipelines.pipeline, pipelines.ByName, never)),
        Route("/live/jobs/{number}", app.live("job_part.html", pipelines.job, pipelines.JobAsk, _over)),
        Route("/live/topics/{topic}/tail", app.tail),
        Route("/topics/{topic}/messages/tail", app.page(TAIL)),
        Route("/topics/{topic}/messages/{partition}/{offset}/value", app.value),
        Route("/topics/{topic}/export", app.export),
    ]
    routes += [Route(_routed(path), app.change(ask, change), methods=["POST"]) for path, ask, change in CHANGES]
    routes += [Route(f"/api{_routed(page.path)}", app.api(page)) for page in PAGES]
    routes += [Route(_routed(page.path), app.page(page)) for page in PAGES if page.template]
    failures: Mapping[Any, Any] = dict.fromkeys((HTTPException, ValidationError, AvowError, Exception), app.failed)
    return Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=failures), house.rules)


def _routed(path: str) -> str:
    """A group's name may hold anything, slashes too."""
    return path.replace("{group}", "{group:path}")


def _over(job: pipelines.JobRow) -> bool:
    return not job.running
