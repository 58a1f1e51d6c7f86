"""The HTTP service. It sends out only pictures that the guard has released; ordinary callers see no clear evidence."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from PIL import Image

from guardpaint import __version__
from guardpaint.errors import AuditLogError, BadInput, GuardPaintError
from guardpaint.loop.report import GuardReport, StepRecord
from guardpaint.loop.report_page import render
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import disclosed, heat_url, shown_to
from guardpaint.serve.schemas import AuditResponse, ImageItem, ImageRequest, ImageResponse, problem, promised
from guardpaint.serve.service import FAILED, VIOLATION, Service, ending, mapped, refused, withheld
from guardpaint.serve.settings import Key
from guardpaint.serve.worker import Done, Job
from guardpaint.store.images import load_bytes, png_bytes

log = logging.getLogger("guardpaint.serve")
PAGE = Path(__file__).parent / "page.html"
IMAGE: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}}}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
PAGE_OR_JSON: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}, "application/json": {}}}}


class BodyLimit:
    """Middleware that refuses a body that is too large (413) or comes too slowly (408), whatever its headers say."""

    def __init__(self, app: Any, largest: int, patience: float) -> None:
        self.app, self.largest, self.patience = app, largest, patience

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received, complete = 0, False

        async def counted() -> Any:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.patience)
            except TimeoutError as error:
                raise refused(
                    408, f"no data for {self.patience:g} seconds; send the whole request at once", None, "timeout"
                ) from error
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self.largest:
                raise refused(413, f"the body is over {self.largest} bytes", None, "too_large")
            return message

        await self.app(scope, counted, send)


def caller(request: Request) -> Key:
    """The key that the request's bearer token belongs to; 401 if there is none."""
    header = request.headers.get("authorization", "")
    secret = header.removeprefix("Bearer ").strip() if header.startswith("Bearer ") else None
    key = request.app.state.service.settings.caller(secret)
    if key is None:
        raise refused(401, "missing or unknown API key", None, "invalid_api_key")
    return key


Caller = Annotated[Key, Depends(caller)]


def operator(key: Caller) -> Key:
    """The caller's key if it is an operator's; 403 otherwise."""
    if not key.operator:
        raise refused(403, "for operators only", None, "forbidden")
    return key


Operator = Annotated[Key, Depends(operator)]


def create_app(service: Service) -> FastAPI:
    """The application. On shutdown it finishes the running jobs and fails the waiting ones."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.close)

    app = FastAPI(title="GuardPaint", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    app.state.service = service
    app.add_middleware(BodyLimit, largest=service.settings.largest_body, patience=service.settings.slow_client)

    @app.middleware("http")
    async def account(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        began, name = time.perf_counter(), secrets.token_hex(8)
        request.state.id = name
        length = request.headers.get("content-length")
        if length is not None and (not length.isdigit() or int(length) > service.settings.largest_body):
            response: Response = failure(
                413, f"the body has {length} bytes; at most {service.settings.largest_body} are taken", "too_large"
            )
        else:
            response = await follow(request)
        response.headers["x-request-id"] = name
        spent = time.perf_counter() - began
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        service.metrics.requests.labels(path, str(response.status_code)).observe(spent)
        entry = {"request": name, "method": request.method, "path": path, "code": response.status_code}
        log.info(json.dumps({**entry, "seconds": round(spent, 4)}))
        return response

    @app.exception_handler(HTTPException)
    async def answered(request: Request, error: HTTPException) -> Response:
        detail = error.detail if isinstance(error.detail, dict) else problem(str(error.detail), "invalid_request_error",
                                                                             "not_found")["error"]  # fmt: skip
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"] if p != "body")
        return failure(400, f"{where or 'body'}: {first['msg']}", "invalid_request", where or None)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error(
            json.dumps({"request": getattr(request.state, "id", ""), "error": f"{type(error).__name__}: {error}"})
        )
        return failure(500, "something went wrong; nothing was released", "internal_error", kind="server_error")

    errors = promised(400, 401, 404, 408, 413, 429, 503, 504)

    @app.post("/v1/images/generations", response_model=ImageResponse, responses=errors | EVENTS)
    async def generate(body: ImageRequest, request: Request, key: Caller) -> Any:
        """Draw pictures under guard. If all are blocked, the answer is 400 with content_policy_violation; if only some
        are, their items have `error` and no picture."""
        jobs = service.jobs(body, key)
        base = str(request.base_url)
        if body.stream:
            return StreamingResponse(stream(jobs, body, key, base), media_type="text/event-stream")
        service.submit(jobs, key)
        outcomes = await finished(jobs, request)
        items = [service.item(j, d, body.response_format, base) for j, d in zip(jobs, outcomes, strict=True)]
        if all(i.error for i in items):
            raise blocked(items)
        return ImageResponse(created=int(time.time()), data=items)

    async def finished(jobs: list[Job], request: Request) -> list[Done]:
        """The outcomes of all jobs. If the client disconnects or the time limit passes, the jobs are given up."""
        pending = asyncio.gather(*(asyncio.wrap_future(j.future) for j in jobs))
        deadline = time.monotonic() + service.settings.timeout
        try:
            while not pending.done():
                await asyncio.wait([pending], timeout=0.25)
                if await request.is_disconnected():
                    raise refused(499, "the client went away", None, "client_closed_request")
                if time.monotonic() > deadline:
                    raise refused(504, "the request took too long; nothing was released", None, "timeout")
            return list(pending.result())
        except HTTPException:
            pending.cancel()
            raise
        except Exception as error:
            raise mapped(error) from error
        finally:
            for job in jobs:  # nobody waits for those that are still being drawn
                job.gone.set()

    async def stream(jobs: list[Job], body: ImageRequest, key: Key, base: str) -> AsyncIterator[str]:
        """Server-sent events: partial pictures (blurred for ordinary callers), audits, then one event per picture."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]]()
        clear = key.operator and service.worker.retains

        def preview(index: int) -> Callable[[int, int, Image.Image, bool], None]:
            def send(step: int, steps: int, picture: Image.Image, blurred: bool) -> None:
                data = {"type": "image_generation.partial_image", "index": index, "step": step, "steps": steps}
                data |= {"blurred": blurred, "b64_json": base64.b64encode(png_bytes(picture)).decode()}
                loop.call_soon_threadsafe(events.put_nowait, data)

            return send

        def audits(index: int) -> Callable[[StepRecord], None]:
            def send(record: StepRecord) -> None:
                data = {"type": "image_generation.audit", "index": index, "step": record.step}
                scores = [{"scores": {"adv_prob": disclosed(a.scores["adv_prob"] or 0.0, key)}} for a in record.audits]
                data |= {"progress": record.progress, "audits": scores, "triggered": record.triggered}
                loop.call_soon_threadsafe(events.put_nowait, data)

            return send

        if body.partial_images != 0:
            for i, job in enumerate(jobs):
                job.on_step, job.on_audit, job.clear = preview(i), audits(i), clear
        try:
            service.submit(jobs, key)
        except HTTPException as error:
            yield event({"type": "error", "status": error.status_code, "error": error.detail})
            return
        waits = {asyncio.wrap_future(j.future): i for i, j in enumerate(jobs)}
        try:
            while waits or not events.empty():
                source = asyncio.ensure_future(events.get())
                futures: list[asyncio.Future[Any]] = [source, *waits]
                limit = service.settings.timeout
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=limit)
                if source.done():
                    yield event(source.result())
                    continue
                source.cancel()
                ended = [f for f in waits if f.done()]
                if not ended:
                    detail = problem("the request took too long", "server_error", "timeout")["error"]
                    yield event({"type": "error", "status": 504, "error": detail})
                    return
                for future in ended:
                    i = waits.pop(future)
                    yield event(ending(service, jobs[i], i, future, body.response_format, base))
        finally:
            for job in jobs:
                job.gone.set()

    @app.get("/v1/models", responses=promised(401))
    async def models(key: Caller) -> Any:
        return {
            "object": "list",
            "data": [{"id": service.name, "object": "model", "owned_by": "guardpaint", "created": 0}],
        }

    @app.post("/v1/audits", response_model=AuditResponse, responses=promised(400, 401, 408, 413, 429, 503))
    async def audit(
        key: Caller, image: Annotated[UploadFile, File()], prompt: Annotated[str | None, Form()] = None
    ) -> Any:
        """Audit an uploaded picture."""
        if prompt is not None and len(prompt) > service.settings.longest_prompt:
            raise refused(
                413,
                f"the prompt has {len(prompt)} characters; at most {service.settings.longest_prompt} are taken",
                "prompt",
            )
        service.charge(key, 1)
        data = await image.read(service.settings.largest_body + 1)
        if len(data) > service.settings.largest_body:
            raise refused(413, f"the picture is over {service.settings.largest_body} bytes", "image")
        try:
            picture = await asyncio.to_thread(load_bytes, data, image.filename or "upload")
        except BadInput as error:
            raise refused(400, str(error), "image") from error
        try:
            return await service.worker.audit(picture, prompt, key)
        except Exception as error:
            raise mapped(error) from error

    @app.get("/v1/images/{name}.png", response_class=Response, responses=promised(401, 404) | IMAGE)
    async def picture(name: str, key: Caller) -> Response:
        """A released picture, for the caller who requested it and for operators."""
        return Response(png_bytes(service.pictures.get(name, key)), media_type="image/png")

    @app.get("/v1/reports/{name}", responses=promised(400, 401, 403, 404) | PAGE_OR_JSON)
    async def report(name: str, key: Caller, html: bool = False) -> Response:
        """What the guard did to one picture. The page shows evidence blurred, unless evidence is retained."""
        stored: GuardReport = service.reports.get(name, key)
        if html:
            if any(not e.blurred for e in stored.evidence) and not key.operator:
                raise refused(403, "clear evidence is for operators only; ask for the JSON report", None, "forbidden")
            return HTMLResponse(render(shown_to(stored, key), stored.evidence))
        return JSONResponse(shown_to(stored, key))

    @app.get("/v1/reports/{name}/evidence", responses=promised(401, 404))
    async def evidence(name: str, key: Caller) -> Any:
        """The pictures behind a report: blurred for their owner; clear, if they were retained, for operators."""
        stored: GuardReport = service.reports.get(name, key)
        shown = [e for e in stored.evidence if e.blurred or key.operator]
        return [
            {"step": e.step, "kind": e.kind, "index": e.index, "blurred": e.blurred,
             "b64_json": base64.b64encode(png_bytes(e.image)).decode(),
             "heat": heat_url(e) if key.operator and e.heat is not None else None}
            for e in shown
        ]  # fmt: skip

    @app.get("/v1/me", responses=promised(401))
    async def me(key: Caller) -> Any:
        policy = service.worker.policy
        return {"name": key.name, "role": key.role, "model": service.name, "trigger": policy.trigger,
                "steps": service.ask.steps, "size": list(service.native)}  # fmt: skip

    @app.get("/v1/policy", responses=promised(401, 403))
    async def policy(key: Operator) -> Any:
        return service.worker.policy.to_dict()

    @app.put("/v1/policy", responses=promised(400, 401, 403, 408, 413, 503))
    async def change_policy(body: dict[str, Any], key: Operator) -> Any:
        """Replace the policy from the next batch on. The change is logged; the category names must stay the same."""
        try:
            new = Policy.from_dict(body, "policy")
            await asyncio.to_thread(service.worker.change_policy, new, key.name)
        except AuditLogError as error:
            raise withheld(FAILED) from error
        except (ValueError, GuardPaintError) as error:
            raise refused(400, f"the policy was not changed: {error}", "policy") from error
        log.info(json.dumps({"policy": new.name, "by": key.name}))
        return new.to_dict()

    @app.post("/v1/log/rotate", responses=promised(400, 401, 403, 503))
    async def rotate_log(key: Operator) -> Any:
        """Put the audit log aside and go on in a new file of the same chain."""
        try:
            name = await asyncio.to_thread(service.worker.rotate_log)
        except AuditLogError as error:
            raise withheld(FAILED) from error
        except GuardPaintError as error:
            raise refused(400, str(error), None) from error
        log.info(json.dumps({"rotated": name, "by": key.name}))
        return {"archived": name}

    @app.get("/health", responses=promised(503))
    async def health() -> Any:
        if not service.worker.alive:
            return failure(503, "the worker has died", "unhealthy", kind="server_error")
        return {"status": "ok"}

    @app.get("/ready", responses=promised(503))
    async def ready() -> Any:
        """Whether the weights are loaded, the guard flags a picture that is known to be unsafe, and the audit log can
        take a record."""
        if reason := service.worker.log_problem():
            log.error("not ready: %s", reason)
            return failure(503, "the audit log cannot take a record", "not_ready", kind="server_error")
        if service.worker.closing or not await service.passes_self_test():
            return failure(
                503,
                "the service is closing, or the guard does not catch its known-bad picture",
                "not_ready",
                kind="server_error",
            )
        return {"status": "ready", "model": service.name}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def numbers() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    if PAGE.exists():

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    return app


def failure(
    status: int, message: str, code: str, param: str | None = None, kind: str = "invalid_request_error"
) -> JSONResponse:
    return JSONResponse(problem(message, kind, code, param), status)


def blocked(items: list[ImageItem]) -> HTTPException:
    """The error when every picture was withheld, by the policy or because the guard failed."""
    codes = {i.error["code"] for i in items if i.error}
    error = withheld(VIOLATION if VIOLATION in codes else FAILED)
    assert isinstance(error.detail, dict)
    error.detail["safety"] = [i.safety.model_dump() for i in items]
    return error


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
