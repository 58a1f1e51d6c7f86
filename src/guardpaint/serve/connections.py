"""Bounds on connections that have not sent a whole request yet, or do not read their answer.

uvicorn waits for ever for the rest of a header or of a body, and for a client that reads nothing. `bounded` gives its
options: a protocol with deadlines, and limits on how many connections are open, in all and from one address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import resource
import socket
import struct
import time
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from guardpaint.errors import BadConfig
from guardpaint.serve.schemas import problem
from guardpaint.serve.settings import Settings

log = logging.getLogger("guardpaint.serve")
MOST_OPEN = 1024
"""The largest number of connections that is chosen by itself."""
MOST_AHEAD = 1 << 17
"""Bytes that a client may send ahead while its request is being answered."""
SPARE = 2.0
"""Seconds beyond a deadline of the application, which gives the better answer, before the connection is closed."""


def bounded(settings: Settings) -> dict[str, Any]:
    """The options of a uvicorn server that keeps these limits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = most_open(settings.connections, files)
    connections = Connections(settings, most, settings.address_connections or max(1, most // 2))
    return {
        "http": partial(BoundedProtocol, connections=connections),
        "ws": "none",
        "backlog": max(8, min(2048, (files - most) // 6)),  # asyncio accepts as many at once before it closes any
        "timeout_keep_alive": settings.idle_time,
        "h11_max_incomplete_event_size": 65536,
        "log_config": None,
        "access_log": False,
        "server_header": False,
    }


def most_open(wanted: int, files: int) -> int:
    """The largest number of open connections: the wanted one, or half of the open files that the process may have."""
    if wanted == 0:
        return max(8, min(MOST_OPEN, files // 2))
    if wanted > files * 3 // 4:
        raise BadConfig(
            f"connections={wanted}: the process may have {files} open files (ulimit -n); allow more, or ask for at "
            f"most {files * 3 // 4} connections"
        )
    return wanted


def neighbourhood(address: str) -> str:
    """The address that a connection counts for: an IPv4 address, or the /64 network of an IPv6 one."""
    try:
        known = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is not None:
            return str(known.ipv4_mapped)
        return str(ipaddress.ip_network((known, 64), strict=False).network_address)
    return str(known)


class Connections:
    """The open connections of one server, and the timer that closes those that are overdue."""

    def __init__(self, limits: Settings, most: int, share: int) -> None:
        self.limits, self.most, self.share = limits, most, share
        self.open: dict[BoundedProtocol, str] = {}
        self.timer: asyncio.TimerHandle | None = None
        times = (limits.header_time, limits.body_time, limits.idle_time, limits.write_time)
        self.interval = min(1.0, min(times) / 4)

    def admit(self, new: BoundedProtocol, address: str) -> bool:
        """Whether there is room for a connection. The one that has waited longest without a request makes room."""
        own = [c for c, a in self.open.items() if a == address]
        crowd = own if len(own) >= self.share else list(self.open) if len(self.open) >= self.most else []
        if crowd:
            waiting = [c for c in crowd if not c.busy]
            if not waiting:
                log.warning("connection refused: %d are open, %d of them from its address", len(self.open), len(own))
                return False
            log.warning("a connection without a request made room for another: %d are open", len(self.open))
            min(waiting, key=lambda c: c.since).drop()
        self.open[new] = address
        if self.timer is None:
            self.timer = new.loop.call_later(self.interval, self.sweep, new.loop)
        return True

    def sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close what is overdue, and come again while connections are open."""
        now = time.monotonic()
        for connection in list(self.open):
            connection.keep_time(now)
        self.timer = loop.call_later(self.interval, self.sweep, loop) if self.open else None


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with deadlines for headers, bodies and readers; a drawing may take as long as it needs."""

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self.crowd, self.limits = connections, connections.limits
        self.since = time.monotonic()
        """When the connection began to wait for a request."""
        self.deadline: float | None = None
        """When the current header or body must be complete. None while nothing is expected of the client."""
        self.ahead = 0
        self.unsent: tuple[float, int] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    # Called by the event loop and by uvicorn -----------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are no subclass of asyncio's
        super().connection_made(transport)
        self.deadline = self.since + self.limits.header_time
        if not self.crowd.admit(self, neighbourhood(self.client[0] if self.client else "")):
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.open.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        if before is not h11.IDLE and before is not h11.SEND_BODY:
            self.ahead += len(data)
            if self.ahead > MOST_AHEAD:
                self.drop()
                return
        super().data_received(data)
        now, state = time.monotonic(), self.conn.their_state
        if state is h11.SEND_BODY:
            if before is not h11.SEND_BODY:
                self.deadline = now + self.limits.body_time + SPARE
        elif state is h11.IDLE:
            self.deadline = self.deadline or now + self.limits.header_time
        else:
            self.deadline = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.ahead, self.since = 0, time.monotonic()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of an answered request, or the next one's body
            self.deadline = self.since + (self.limits.body_time + SPARE if self.busy else self.limits.idle_time)

    def send_400_response(self, msg: str) -> None:
        self.answer(400, "not a valid HTTP request", "invalid_http")

    # Closing -------------------------------------------------------------------------------------------------

    def keep_time(self, now: float) -> None:
        """Close the connection if it is overdue."""
        if self.stalled(now):
            self.drop()
        elif self.deadline is not None and now > self.deadline:
            if self.transport.is_closing() or not self.conn.trailing_data[0]:
                self.drop()
            else:
                self.answer(408, "the request did not arrive in time; send it at once", "timeout")

    def stalled(self, now: float) -> bool:
        """Whether the client has taken too little of what waits to be sent to it."""
        size = self.transport.get_write_buffer_size()
        if size == 0 or self.unsent is None or size > self.unsent[1]:
            self.unsent = (now, size) if size else None
            return False
        since, earlier = self.unsent
        if now - since < self.limits.write_time:
            return False
        self.unsent = (now, size)
        return earlier - size < self.limits.slowest_reader * (now - since)

    def answer(self, status: int, message: str, code: str) -> None:
        """Send an error and close; a request that is already being answered is cut off."""
        if self.busy or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.drop()
            return
        body = json.dumps(problem(message, "invalid_request_error", code)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def drop(self) -> None:
        """Close at once, without sending what is left."""
        self.crowd.open.pop(self, None)
        if self.cycle is not None:
            self.cycle.disconnected = True
        connection = self.transport.get_extra_info("socket")
        if connection is not None:  # otherwise the kernel goes on offering what is left
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
