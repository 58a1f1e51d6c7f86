"""Audits of uploaded pictures, each within its share of a memory budget."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import UploadFile
from fastapi.exceptions import HTTPException

from guardpaint.errors import BadInput, TooLarge
from guardpaint.serve.jobs import Overloaded
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.service import Service, mapped, refused
from guardpaint.serve.settings import Key
from guardpaint.store.uploads import Reading, Upload

HEADER = 4
"""Copies of a file's bytes that reading its headers may make."""


class Memory:
    """A budget of bytes, handed out in the order of the requests; who waits too long gets Overloaded."""

    def __init__(self, total: int, patience: float) -> None:
        self.total, self.free, self.patience = total, total, patience
        self.waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def share(self, size: int) -> AsyncIterator[None]:
        """Hold this many bytes of the budget, or all of it if they are more."""
        size = min(size, self.total)
        await self.take(size)
        try:
            yield
        finally:
            self.give(size)

    async def take(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append((turn, size))
        self.give(0)
        try:
            async with asyncio.timeout(self.patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give(size)  # it came in the moment in which the wait ended
            else:
                self.give(0)  # a smaller one behind it may fit
            if isinstance(error, TimeoutError):
                raise Overloaded("too many uploads are being audited; try again later") from error
            raise

    def give(self, size: int) -> None:
        """Put bytes back, and let those go on whose turn it is."""
        self.free += size
        while self.waiting and (self.waiting[0][0].done() or self.waiting[0][1] <= self.free):
            turn, wanted = self.waiting.popleft()
            if not turn.done():  # else nobody waits for it any more
                self.free -= wanted
                turn.set_result(None)


async def audited_upload(
    service: Service, memory: Memory, image: UploadFile, prompt: str | None, key: Key
) -> AuditResponse:
    """The audit of the worst frame, shown in the worst way. A picture that cannot be audited whole is refused."""
    settings, name = service.settings, image.filename or "upload"
    if image.size is None or image.size > settings.largest_body:
        raise refused(413, f"the picture is over {settings.largest_body} bytes", "image", "too_large")
    try:
        async with memory.share(HEADER * image.size):
            upload = await asyncio.to_thread(Upload, await image.read(), name, settings.uploads)
            frames, bytes_needed, shapes = upload.frames, upload.memory, upload.shapes
            del upload  # nobody holds a file in memory while waiting
        for width, height in shapes:  # before anything is decoded; a turned picture has the same sides
            service.within_scope((height, width))
        service.charge(key, min(frames, key.per_minute) - 1)
        async with memory.share(bytes_needed):
            await image.seek(0)
            upload = await asyncio.to_thread(Upload, await image.read(), name, settings.uploads)
            return await worst(service, upload, prompt, key)
    except HTTPException:
        raise
    except TooLarge as error:
        raise refused(413, str(error), "image", "too_large") from error
    except BadInput as error:
        raise refused(400, str(error), "image") from error
    except Exception as error:
        raise mapped(error) from error


async def worst(service: Service, upload: Upload, prompt: str | None, key: Key) -> AuditResponse:
    """The worst answer to any reading of the picture: flagged, then the highest adv_prob, then the lowest S."""
    deadline = time.monotonic() + service.settings.timeout
    answers: list[AuditResponse] = []
    readings = upload.readings()
    while (reading := await asyncio.to_thread(next, readings, None)) is not None:
        service.within_scope((reading.size[1], reading.size[0]))  # a damaged file may hold another size than its header
        if time.monotonic() > deadline:
            raise refused(504, "the audit took too long; send fewer frames", None, "timeout")
        answer = await service.worker.audit(reading.image, prompt, key)
        answers = [max([*answers, in_terms_of(answer, reading, upload.frames)], key=badness)]
    return answers[0]


def badness(answer: AuditResponse) -> tuple[bool, float, float]:
    return answer.flagged, answer.scores["adv_prob"] or 0.0, -(answer.scores["S"] or 0.0)


def in_terms_of(answer: AuditResponse, reading: Reading, frames: int) -> AuditResponse:
    """The answer to a reading in terms of the picture that was sent."""
    (width, height), shown = reading.size, reading.image
    boxes = []
    for x, y, w, h in answer.boxes:
        left, top = x * width // shown.width, y * height // shown.height
        right, bottom = -(-(x + w) * width // shown.width), -(-(y + h) * height // shown.height)
        boxes.append([left, top, right - left, bottom - top])
    about = {"frames": frames, "frame": reading.frame, "reading": reading.name, "size": [width, height]}
    shrunk = None if shown.size == reading.size else list(shown.size)
    return answer.model_copy(update={"boxes": boxes, "shrunk_to": shrunk, **about})
