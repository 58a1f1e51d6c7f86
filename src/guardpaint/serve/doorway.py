"""What every request and every answer passes: limits, hosts, origins and keys on the way in, headers on the way out.

Requests are refused here before their body is read. Every error has the same shape (`schemas.Problem`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as PlainHTTPException

from guardpaint.serve.schemas import problem
from guardpaint.serve.service import Service, refused
from guardpaint.serve.settings import Settings

log = logging.getLogger("guardpaint.serve")
CODES = {404: "not_found", 405: "method_not_allowed"}
READING = ("GET", "HEAD", "OPTIONS")
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Sent with every answer that does not set its own. Pictures and reports are not for caches."""


class ProblemResponse(JSONResponse):
    """An error body in ASCII and without angle brackets, so that nothing of a request comes back as markup."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content)
        return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def failure(
    status: int, message: str, code: str, param: str | None = None, kind: str = "invalid_request_error"
) -> JSONResponse:
    return ProblemResponse(problem(message[:400], kind, code, param), status)


def answer_of(error: PlainHTTPException) -> JSONResponse:
    """The answer to a refusal, also to one of the framework's own, which have a text only."""
    detail = error.detail
    if not isinstance(detail, dict):
        code = CODES.get(error.status_code, "invalid_request")
        detail = problem(str(detail)[:400], "invalid_request_error", code)["error"]
    return ProblemResponse({"error": detail}, error.status_code, error.headers)


# On the way in -----------------------------------------------------------------------------------------------


def admit(request: Request, settings: Settings) -> None:
    """Refuse a request that must get no further: too long, for another host, from another site, or without a key."""
    length = request.headers.get("content-length")
    if length is not None and (not length.isdigit() or int(length) > settings.largest_body):
        raise refused(
            413, f"the body has {length[:20]} bytes; at most {settings.largest_body} are taken", None, "too_large"
        )
    host = request.headers.get("host", "")
    if (not settings.keys or settings.hosts) and not known_host(host, settings):
        raise refused(400, "this service is not called by that host name", None, "invalid_host")
    if not settings.keys and request.method not in READING and not same_site(request, host):
        raise refused(403, "requests from other sites are refused", None, "cross_site")
    if request.url.path.startswith("/v1/") and settings.caller(bearer(request)) is None:
        raise refused(401, "missing or unknown API key", None, "invalid_api_key")


def bearer(request: Request) -> str | None:
    """The secret in the Authorization header."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def known_host(host: str, settings: Settings) -> bool:
    """Whether the service may be called by this Host header: a loopback address or a name that the operator allows.

    A page elsewhere that has its own name point to this machine is kept out by this (DNS rebinding).
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in settings.hosts or name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def same_site(request: Request, host: str) -> bool:
    """Whether a browser says that a request comes from the service's own page; other clients say nothing."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    own = origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
    return own and site in (None, "same-origin", "none")


class BodyLimit:
    """Middleware that refuses a body that is too large (413) or comes too slowly (408), whatever its headers say."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received, complete, limits = 0, False, self.settings
        deadline = time.monotonic() + limits.body_time

        async def counted() -> Any:
            nonlocal received, complete
            if complete:
                return await receive()
            patience = min(limits.slow_client, deadline - time.monotonic())
            try:
                message = await asyncio.wait_for(receive(), max(0.0, patience))
            except TimeoutError as error:
                raise refused(
                    408, "the body did not arrive in time; send the whole request at once", None, "timeout"
                ) from error
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > limits.largest_body:
                raise refused(413, f"the body is over {limits.largest_body} bytes", None, "too_large")
            return message

        await self.app(scope, counted, send)


# On the way out ----------------------------------------------------------------------------------------------


def html_page(text: str) -> HTMLResponse:
    """A page whose own script and style may run, and nothing else."""
    sources = []
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        blocks = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in blocks]
        sources += [f"{kind} " + " ".join(f"'sha256-{h}'" for h in hashes)] if hashes else []
    policy = "; ".join([POLICY, *sources, "img-src 'self' data: blob:", "connect-src 'self'"])
    return HTMLResponse(text, headers={"content-security-policy": policy})


def install(app: FastAPI, service: Service) -> None:
    """Put the doorway in front of an application: limits, headers, the request log, and one shape for every error."""
    settings, schema = service.settings, app.openapi
    app.add_middleware(BodyLimit, settings=settings)

    def openapi() -> dict[str, Any]:
        """The schema without the framework's own 422, which is never sent: malformed requests get 400."""
        described = schema()
        for methods in described["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(name, None)
        return described

    app.openapi = openapi  # type: ignore[method-assign]

    @app.middleware("http")
    async def account(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        began, name = time.perf_counter(), secrets.token_hex(8)
        request.state.id = name
        try:
            admit(request, settings)
            response = await follow(request)
        except HTTPException as error:
            response = answer_of(error)
        except Exception as error:
            response = broken(request, error)
        for header, value in {**HEADERS, "x-request-id": name}.items():
            response.headers.setdefault(header, value)
        spent = time.perf_counter() - began
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        service.metrics.requests.labels(path, str(response.status_code)).observe(spent)
        entry = {"request": name, "method": request.method, "path": path, "code": response.status_code}
        log.info(json.dumps({**entry, "seconds": round(spent, 4)}))
        return response

    @app.exception_handler(PlainHTTPException)
    async def answered(request: Request, error: PlainHTTPException) -> Response:
        return answer_of(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return failure(400, "the body is not valid JSON", "invalid_request")
        where = ".".join(str(p) for p in first["loc"] if p != "body")[:100]
        return failure(400, f"{where or 'body'}: {first['msg']}", "invalid_request", where or None)


def broken(request: Request, error: Exception) -> JSONResponse:
    """The answer to an error that nobody expected."""
    log.error(json.dumps({"request": request.state.id, "error": f"{type(error).__name__}: {error}"}))
    return failure(500, "something went wrong; nothing was released", "internal_error", kind="server_error")
