"""Access control: the Host header, the token, same-origin changes only, and the Content-Security-Policy.

Theory of operation
-------------------
A page on the loopback address is reachable by every site that the person's browser visits. Four things keep those out:

* the Host header must be an address or a name that was given: a foreign name that resolves to us (DNS rebinding) is
  refused;
* a change is a POST from our own origin, with a secret that only our own pages hold;
* with a token (every other address needs one), nothing is served without it, neither a page nor a file;
* the Content-Security-Policy lets nothing run but our own files: what stands in a record can never run.

``--read-only`` refuses every POST here, whatever the pages show.

Owns: these rules. Must not know: what is asked.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_CHARS_MIN = 16
LOGIN = "/login"
OPEN = (LOGIN, "/static")  # what a browser needs to show the login

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with none at all, a form of ours would have no origin either
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who has access."""

    hosts: frozenset[str] = frozenset()  # names by which the server is called, beside addresses and localhost
    token: str | None = field(default=None, repr=False)
    read_only: bool = False
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)  # of this server's life

    def host_allowed(self, header: str) -> bool:
        """An address cannot be rebound, so every one is allowed; a name must be known."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost" or name in self.hosts
        return True

    @property
    def session(self) -> str:
        """The value of the session cookie. It is invalid after a restart."""
        return hmac.new(self.secret.encode(), b"session", hashlib.sha256).hexdigest()

    @property
    def form(self) -> str:
        """What every form of ours carries."""
        return hmac.new(self.secret.encode(), b"form", hashlib.sha256).hexdigest()

    def token_is(self, token: str) -> bool:
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def form_is(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode(), self.form.encode())

    def admits(self, headers: Headers, cookie: str) -> bool:
        """Whether the token was shown, now or at the login."""
        if self.token is None:
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.token_is(token.strip()):
            return True
        # Not by http.cookies: it stops at the first cookie that it cannot parse, which may be another application's.
        session = cookie_parser(headers.get("cookie", "")).get(cookie, "")
        return hmac.compare_digest(session.encode(), self.session.encode())


def cookie_of(scope: Scope) -> str:
    """The name of the session's cookie. A browser sends a host's cookies to all its ports, so it has the port in it."""
    return f"avow-dashboard-{scope['server'][1]}"


def _is_remote_address(host: str) -> bool:
    """An address of another machine. There a browser keeps no opener policy without TLS, and complains of one."""
    try:
        return not ipaddress.ip_address(urlsplit(f"//{host}").hostname or "").is_loopback
    except ValueError:
        return False


class Guard:
    """Stands before the whole application."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Headers(scope=scope)
        refusal = self._refusal(scope["method"], scope["path"], request, cookie_of(scope))
        plain = scope["scheme"] == "http" and _is_remote_address(request.get("host", ""))

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not plain:
                    headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, method: str, path: str, headers: Headers, cookie: str) -> Response | None:
        rules = self._rules
        if not rules.host_allowed(headers.get("host", "")):
            return PlainTextResponse("This host name is not allowed: see avow dashboard --allow-host.\n", 421)
        if not rules.admits(headers, cookie) and not any(
            path == prefix or path.startswith(prefix + "/") for prefix in OPEN
        ):
            if path.startswith("/api") or path == "/metrics":
                refused = {"problem": "the token is missing or wrong", "advice": "Send Authorization: Bearer TOKEN."}
                return JSONResponse(refused, 401, {"WWW-Authenticate": "Bearer"})
            return RedirectResponse(f"{LOGIN}?next={quote(path)}", 303)
        if method in ("GET", "HEAD"):
            return None
        if method != "POST":
            return PlainTextResponse("Only GET, HEAD and POST are supported.\n", 405)
        if rules.read_only and path != LOGIN:
            return PlainTextResponse("This dashboard is read-only: nothing was changed.\n", 403)
        if not self._is_same_origin(headers):
            return PlainTextResponse(
                "Cross-origin request refused: a change must come from a page of this dashboard.\n", 403
            )
        return None

    def _is_same_origin(self, headers: Headers) -> bool:
        """Browsers send the origin of a request; a program that does not needs the form's secret.

        A proxy may call us by another name than the visitor calls it by: that one is known too, if it was given.
        """
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        try:
            parsed = urlsplit(origin)
        except ValueError:
            return False
        return parsed.netloc == headers.get("host") or parsed.hostname in self._rules.hosts
