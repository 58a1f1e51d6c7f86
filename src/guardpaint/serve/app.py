"""The HTTP service. It sends out only pictures that the guard has released; ordinary callers see no clear evidence."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from PIL import Image

from guardpaint import __version__
from guardpaint.errors import AuditLogError, GuardPaintError, NotKept
from guardpaint.loop.report import StepRecord
from guardpaint.loop.report_page import render
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import disclosed, heat_url, pictures_for, shown_to
from guardpaint.serve.doorway import bearer, failure, html_page, install
from guardpaint.serve.jobs import Done, Job
from guardpaint.serve.schemas import AuditResponse, ImageItem, ImageRequest, ImageResponse, problem, promised
from guardpaint.serve.service import FAILED, VIOLATION, Service, ending, mapped, refused, withheld
from guardpaint.serve.settings import Key
from guardpaint.serve.uploads import Memory, audited_upload
from guardpaint.store.images import png_bytes

log = logging.getLogger("guardpaint.serve")
PAGE = Path(__file__).parent / "page.html"
IMAGE: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}}}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
PAGE_OR_JSON: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}, "application/json": {}}}}


def caller(request: Request) -> Key:
    """The key that the request's bearer token belongs to; 401 if there is none."""
    key: Key | None = request.app.state.service.settings.caller(bearer(request))
    if key is None:
        raise refused(401, "missing or unknown API key", None, "invalid_api_key")
    return key


def drawer(request: Request) -> Key:
    """The caller's key if it may use the API; 403 for a key that is for /metrics only."""
    key = caller(request)
    if key.role == "metrics":
        raise refused(403, "this key is for /metrics only", None, "forbidden")
    return key


Caller = Annotated[Key, Depends(drawer)]


def operator(key: Caller) -> Key:
    """The caller's key if it is an operator's; 403 otherwise."""
    if not key.operator:
        raise refused(403, "for operators only", None, "forbidden")
    return key


Operator = Annotated[Key, Depends(operator)]


def create_app(service: Service) -> FastAPI:
    """The application. On shutdown it closes the worker, which fails waiting jobs and ends the running ones."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.worker.close)

    app = FastAPI(title="GuardPaint", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    app.state.service = service
    memory = Memory(service.settings.upload_memory, service.settings.upload_patience)
    app.router.redirect_slashes = False
    install(app, service)
    errors = promised(400, 401, 404, 408, 413, 429, 503, 504)

    @app.post("/v1/images/generations", response_model=ImageResponse, responses=errors | EVENTS)
    async def generate(body: ImageRequest, request: Request, key: Caller) -> Any:
        """Draw pictures under guard. If all are blocked, the answer is 400 with content_policy_violation; if only some
        are, their items have `error` and no picture."""
        jobs = service.jobs(body, key, request.state.id)
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
        left = asyncio.ensure_future(hung_up(request))
        try:
            futures: list[asyncio.Future[Any]] = [pending, left]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED, timeout=service.settings.timeout)
            if not pending.done() and left.done():
                raise refused(499, "the client went away", None, "client_closed_request")
            if not pending.done():
                raise refused(504, "the request took too long; nothing was released", None, "timeout")
            return list(pending.result())
        except HTTPException:
            pending.cancel()
            raise
        except Exception as error:
            raise mapped(error) from error
        finally:
            left.cancel()
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

    @app.post("/v1/audits", response_model=AuditResponse, responses=promised(400, 401, 408, 413, 429, 503, 504))
    async def audit(
        key: Caller, image: Annotated[UploadFile, File()], prompt: Annotated[str | None, Form()] = None
    ) -> Any:
        """Audit every frame of an uploaded picture, over white, over black and without its alpha. The worst counts."""
        if prompt is not None and len(prompt) > service.settings.longest_prompt:
            raise refused(
                413,
                f"the prompt has {len(prompt)} characters; at most {service.settings.longest_prompt} are taken",
                "prompt",
            )
        service.charge(key, 1)
        return await audited_upload(service, memory, image, prompt, key)

    @app.get("/v1/images/{name}.png", response_class=Response, responses=promised(401, 404) | IMAGE)
    async def picture(name: str, key: Caller) -> Response:
        """A released picture, for the caller who requested it and for operators."""
        return Response(service.pictures.get(name, key), media_type="image/png")

    @app.get("/v1/reports/{name}", responses=promised(400, 401, 403, 404) | PAGE_OR_JSON)
    async def report(name: str, key: Caller, html: bool = False) -> Response:
        """What the guard did to one picture: exactly for operators; coarsely and without heat maps for its owner."""
        stored = service.report(name, key)
        if html:
            if any(not e.blurred for e in stored.evidence) and not key.operator:
                raise refused(403, "clear evidence is for operators only; ask for the JSON report", None, "forbidden")
            return html_page(render(shown_to(stored, key), pictures_for(stored.evidence, key)))
        return JSONResponse(shown_to(stored, key))

    @app.get("/v1/reports/{name}/evidence", responses=promised(401, 404))
    async def evidence(name: str, key: Caller) -> Any:
        """The pictures behind a report: blurred for their owner; clear, if they were retained, for operators."""
        stored = service.report(name, key)
        return [
            {"step": e.step, "kind": e.kind, "index": e.index, "blurred": e.blurred,
             "b64_json": base64.b64encode(png_bytes(e.image)).decode(),
             "heat": heat_url(e) if e.heat is not None else None}
            for e in pictures_for(stored.evidence, key)
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
        """Replace the policy from the next batch on. The change is logged; the category names must stay the same.

        `note` in the answer says whether the change outlasts a restart.
        """
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # what cannot be stored is not taken
            new = Policy.from_dict(body, "policy")
            await asyncio.to_thread(service.worker.change_policy, new, key.name)
        except (AuditLogError, NotKept) as error:
            log.error("the policy was not changed: %s", error)
            raise withheld(FAILED) from error
        except (ValueError, GuardPaintError) as error:
            raise refused(400, f"the policy was not changed: {error}", "policy") from error
        log.info(json.dumps({"policy": new.name, "by": key.name}))
        return {**new.to_dict(), "note": service.worker.policy_note}

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
            return failure(503, "nothing can draw: the worker hangs or has died", "unhealthy", kind="server_error")
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
        blind = {"uncovered": service.worker.uncovered} if service.worker.uncovered else {}
        return {"status": "ready", "model": service.name, "policy": service.worker.policy_note, **blind}

    @app.get("/metrics", response_class=PlainTextResponse, responses=promised(401, 403))
    async def numbers(key: Annotated[Key, Depends(caller)]) -> Response:
        """Prometheus metrics, for operators and for keys of the role `metrics`. Without keys: all but the scores."""
        if service.settings.keys and not (key.operator or key.role == "metrics"):
            raise refused(403, "for operators and for keys of the role metrics", None, "forbidden")
        text = service.metrics.text(scores=bool(service.settings.keys))
        return Response(text, media_type="text/plain; version=0.0.4")

    if PAGE.exists():

        @app.get("/", include_in_schema=False)
        async def page() -> Response:
            return html_page(PAGE.read_text(encoding="utf-8"))

    return app


async def hung_up(request: Request) -> None:
    """Wait until the client has closed its connection.

    `request.is_disconnected()` only polls, and the poll is cancelled before it gets through the middleware.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
