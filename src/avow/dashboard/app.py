"""The web application: requests become parameters, answers become pages, JSON and event streams.

Path and query are validated by the page's ``Params`` model, and the answer is made in a thread of a small pool. Its
clients have time-outs of their own; if it still takes too long the response is 504 and the thread ends by itself later.
The pool does not grow meanwhile: a request that gets no thread in time is answered the same way.

Live parts are server-sent events that carry a piece of HTML each, rendered by the same templates as the page.

Owns: HTTP. Must not know: what any page is about. Neighbours: ``pages`` (the list), ``guard`` (access).
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
from avow.dashboard.changes import CHANGES
from avow.dashboard.formatting import HERE, environment
from avow.dashboard.guard import LOGIN, Guard, cookie_of
from avow.dashboard.pages import MENU, PAGES, TAIL, Page
from avow.dashboard.requests import NoParams, NotFound, Params
from avow.dashboard.state import PAGE_TIMEOUTS, AppState
from avow.errors import AvowError, ConfigError

Answer = TypeVar("Answer")
Handler = Callable[[Request], Awaitable[Response]]

THREADS = 24  # threads for requests; each live tail has its own client
STREAMS_MAX = 40  # live parts at once
LIVE_S = 2.0
STREAM_MAX_S = 30 * 60  # a browser connects again by itself
TAIL_ROWS = 100  # in one event; more are counted
FORM_BYTES_MAX = 64 * 1024
FIELDS_MAX = 50  # of a form
STATIC_AGE_S = 3600


class TimedOut(AvowError):
    """An answer was not ready in time."""


class App:
    """The handlers. ``make`` puts them together."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._templates = environment()
        self._templates.globals |= {
            "menu": MENU,
            "version": version("avow"),
            "read_only": state.rules.read_only,
            "csrf": state.rules.form,
            "locked": state.rules.token is not None,
            "words": explained.WORDS,
        }
        # Not anyio's limit: that one counts those who wait, not the threads that they have stopped waiting for.
        self._threads = ThreadPoolExecutor(THREADS, "avow-answer")
        self._tails = anyio.CapacityLimiter(STREAMS_MAX)
        self._streams = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Threads

    async def _in_thread(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        timeout_s = PAGE_TIMEOUTS * self._state.timeout_s
        future = asyncio.wrap_future(self._threads.submit(function, *arguments))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise TimedOut(
                f"the request timed out after {timeout_s:g} s",
                advice="Kafka or the sink is slow or unreachable. Try again; see also `avow status` and `avow lag`.",
            ) from None

    # Pages

    def page(self, page: Page) -> Handler:
        def show(request: Request, params: Params, answer: Any) -> Response:
            title = page.title.format(**request.path_params)
            context = {"title": title, "nav": page.nav, "answer": answer, "params": params}
            return HTMLResponse(self._render(page.template, **context))

        return self._answered(page, show)

    def api(self, page: Page) -> Handler:
        adapter = page.adapter
        return self._answered(
            page, lambda _request, _params, answer: Response(adapter.dump_json(answer), media_type="application/json")
        )

    def _answered(self, page: Page, show: Callable[[Request, Params, Any], Response]) -> Handler:
        async def handle(request: Request) -> Response:
            began = time.monotonic()
            params = page.params.model_validate(_parameters(request))
            response = show(request, params, await self._in_thread(page.answer, self._state, params))
            response.headers["Server-Timing"] = f"app;dur={(time.monotonic() - began) * 1000:.1f}"
            return response

        return handle

    def _render(self, template: str, **context: Any) -> str:
        return self._templates.get_template(template).render(**context)

    async def home(self, _: Request) -> Response:
        has_pipelines = self._state.watch.pipelines() or not self._state.has_source
        return RedirectResponse("/pipelines" if has_pipelines else "/cluster", 303)

    async def api_page(self, _: Request) -> Response:
        return HTMLResponse(self._render("api.html", title="API", nav="api", document=openapi.document()))

    async def api_document(self, _: Request) -> Response:
        return JSONResponse(openapi.document())

    async def metrics(self, _: Request) -> Response:
        text = await self._in_thread(metrics.text, self._state)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    # Files to save

    async def value(self, request: Request) -> Response:
        params = messages.MessageParams.model_validate(request.path_params)
        data = await self._in_thread(messages.value_bytes, self._state, params)
        return _attachment(iter([data]), f"{params.topic}-{params.partition}-{params.offset}.bin")

    async def export(self, request: Request) -> Response:
        params = messages.MessagesParams.model_validate(_parameters(request))
        # Read before the response begins, so that an error still gets its status code.
        lines = await self._in_thread(lambda: list(messages.export(self._state, params)))
        return _attachment(iter(lines), f"{params.topic}.jsonl")

    # Changes

    def change(self, params: type[Params], make: Callable[..., str]) -> Handler:
        async def changed(request: Request) -> Response:
            form = await _form(request)
            if not self._state.rules.form_is(form.pop("csrf", "")):
                raise HTTPException(
                    403, "The form's token is not valid, or the dashboard was restarted. Reload the page."
                )
            question = params.model_validate({**form, **request.path_params})
            return RedirectResponse(await self._in_thread(make, self._state, question), 303)

        return changed

    async def login(self, request: Request) -> Response:
        rules = self._state.rules
        onwards = request.query_params.get("next", "/")
        if not onwards.startswith("/") or onwards.startswith(("//", "/\\")):
            onwards = "/"
        context = {"title": "Token", "nav": "", "next": onwards}
        if request.method != "POST":
            return HTMLResponse(self._render("login.html", **context, wrong=False))
        form = await _form(request)
        if not rules.token_is(form.get("token", "")):
            await asyncio.sleep(0.5)  # slows down guessing
            return HTMLResponse(self._render("login.html", **context, wrong=True), 403)
        answer = RedirectResponse(onwards, 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(cookie_of(request.scope), rules.session, httponly=True, samesite="strict", secure=secure)
        return answer

    # Live parts

    def live(
        self,
        template: str,
        answer: Callable[[AppState, Any], Any],
        params: type[Params],
        ended: Callable[[Any], bool] = lambda _: False,
    ) -> Handler:
        """A piece of HTML, again whenever it has changed."""

        async def events(question: Params) -> AsyncIterator[str]:
            last = None
            until = time.monotonic() + STREAM_MAX_S
            while time.monotonic() < until and not self._state.closing.is_set():
                try:
                    result = await self._in_thread(answer, self._state, question)
                    body, over = self._render(template, answer=result), ended(result)
                except AvowError as error:
                    body, over = self._render("problem_part.html", problem=str(error), advice=error.advice), False
                yield _event("part", body) if body != last else ": nothing new\n\n"
                last = body
                if over:
                    yield _event("over", "over")
                    return
                await self._pause()

        async def stream(request: Request) -> Response:
            return self._stream(events(params.model_validate(_parameters(request))))

        return stream

    async def _pause(self) -> None:
        """Until the next look, or the end of the server."""
        until = time.monotonic() + LIVE_S
        while time.monotonic() < until and not self._state.closing.is_set():
            await asyncio.sleep(LIVE_S / 10)

    async def tail(self, request: Request) -> Response:
        query = _parameters(request)
        if since := request.headers.get("last-event-id"):  # of a browser that connects again by itself
            query["onwards"] = since
        return self._stream(self._tail_events(messages.TailParams.model_validate(query)))

    async def _tail_events(self, params: messages.TailParams) -> AsyncIterator[str]:
        until = time.monotonic() + STREAM_MAX_S
        closing = self._state.closing
        rows = messages.tail(self._state, params, lambda: time.monotonic() > until or closing.is_set())
        quiet = _event("place", "place")  # once, so that the browser knows where it stands; then nothing
        try:
            while (item := await anyio.to_thread.run_sync(next, rows, None, limiter=self._tails)) is not None:
                records, cursor = item
                shown = records[-TAIL_ROWS:]
                body = self._render("tail_rows.html", rows=shown, left_out=len(records) - len(shown)) if records else ""
                yield f"id: {cursor}\n" + (_event("rows", body) if records else quiet)
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

    # Errors

    async def failed(self, request: Request, error: Exception) -> Response:
        status, problem, advice = _describe(error)
        path = request.url.path
        if path.startswith("/api/"):
            return JSONResponse({"problem": problem, "advice": advice}, status)
        context = {"problem": problem, "advice": advice}
        if request.headers.get("hx-request"):
            # htmx shows what comes with 200 only; the failure is in the text.
            return HTMLResponse(self._render("problem_part.html", **context))
        nav = next((page.nav for page in PAGES if path.startswith(f"/{page.nav}")), "")
        body = self._render("problem.html", title="Something went wrong", nav=nav, status=status, **context)
        return HTMLResponse(body, status)


def _parameters(request: Request) -> dict[str, Any]:
    return {**request.query_params, **request.path_params}


def _describe(error: Exception) -> tuple[int, str, str]:
    """Status, problem and advice."""
    match error:
        case HTTPException():
            return error.status_code, error.detail or "refused", ""
        case ValidationError():
            problems = [
                ": ".join(filter(None, (".".join(map(str, entry["loc"])), entry["msg"].removeprefix("Value error, "))))
                for entry in error.errors()[:5]
            ]
            return 400, f"invalid request: {'; '.join(problems)}", ""
        case NotFound():
            return 404, str(error), error.advice
        case TimedOut():
            return 504, str(error), error.advice
        case ConfigError():
            return 409, str(error), error.advice
        case AvowError():
            return 502, str(error), error.advice
        case _:
            return 500, "internal error: see the log of avow dashboard", ""


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

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["Cache-Control"] = f"max-age={STATIC_AGE_S}"
        return answer


def make(state: AppState) -> ASGIApp:
    """The whole application, with the guard before it."""
    app = App(state)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.watch.start()
        try:
            yield
        finally:
            app.close()
            await anyio.to_thread.run_sync(state.close)

    routes: list[Route | Mount] = [
        Route("/", app.home),
        Route("/api", app.api_page),
        Route("/api/openapi.json", app.api_document),
        Route("/metrics", app.metrics),
        Route(LOGIN, app.login, methods=["GET", "POST"]),
        Mount("/static", Files(directory=HERE / "static")),
        Route("/live/pipelines", app.live("pipelines_part.html", pipelines.pipelines, NoParams)),
        Route("/live/pipelines/{name}", app.live("pipeline_part.html", pipelines.pipeline, pipelines.NameParams)),
        Route(
            "/live/jobs/{number}",
            app.live("job_part.html", pipelines.job, pipelines.JobParams, lambda job: not job.running),
        ),
        Route("/live/topics/{topic}/tail", app.tail),
        Route("/topics/{topic}/messages/tail", app.page(TAIL)),
        Route("/topics/{topic}/messages/{partition}/{offset}/value", app.value),
        Route("/topics/{topic}/export", app.export),
    ]
    routes += [Route(_routed(path), app.change(params, change), methods=["POST"]) for path, params, change in CHANGES]
    routes += [Route(f"/api{_routed(page.path)}", app.api(page)) for page in PAGES]
    routes += [Route(_routed(page.path), app.page(page)) for page in PAGES if page.template]
    failures: Mapping[Any, Any] = dict.fromkeys((HTTPException, ValidationError, AvowError, Exception), app.failed)
    return Guard(Starlette(routes=routes, lifespan=lifespan, exception_handlers=failures), state.rules)


def _routed(path: str) -> str:
    """A group's name may hold anything, slashes too."""
    return path.replace("{group}", "{group:path}")
