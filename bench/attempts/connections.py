"""Connections that cost an attacker nothing: half a header, a byte now and then, more of them than descriptors."""

from __future__ import annotations

import resource
import select
import socket
import time
from contextlib import suppress

from attempts import Outcome
from attempts.processes import until
from attempts.stand import DOUBLE_SERVICE, DOUBLES, USER, Stand, served

PATIENCE = 75.0
"""Seconds after which a connection that never completes its header must be closed."""
BODY_PATIENCE = 150.0
"""The same for a body."""
START_LINE = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
HEADERS = START_LINE + f"Authorization: Bearer {USER}\r\nContent-Type: application/json\r\n".encode()


def opened(stand: Stand) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stand.port), timeout=5)


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, after reading whatever it sent."""
    with suppress(OSError):
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(65536):
                return True
        return False
    return True


def outlasts(first: bytes, byte: bytes, patience: float = PATIENCE) -> Outcome:
    """Send a part of a request, then a byte every five seconds, and see when the service has enough of it."""
    stand = DOUBLE_SERVICE.get()
    connection = opened(stand)
    connection.sendall(first)
    began = last = time.monotonic()
    while not closed(connection) and time.monotonic() - began < patience:
        if byte and time.monotonic() - last > 5:
            with suppress(OSError):
                connection.sendall(byte)
            last = time.monotonic()
        time.sleep(0.2)
    spent = time.monotonic() - began
    connection.close()
    ended = spent < patience
    got = f"closed after {spent:.0f} s" if ended else f"open after {spent:.0f} s"
    return Outcome(f"closed within {patience:.0f} s", got, ended and stand.healthy())


def a_half_open_header() -> Outcome:
    return outlasts(START_LINE + b"Content-Le", b"")


def a_header_byte_by_byte() -> Outcome:
    return outlasts(START_LINE + b"X-Slow: ", b"x")


def nothing_at_all() -> Outcome:
    return outlasts(b"", b"")


def a_body_byte_by_byte() -> Outcome:
    return outlasts(HEADERS + b"Content-Length: 5000\r\n\r\n{", b" ", BODY_PATIENCE)


def a_body_byte_by_byte_without_a_key() -> Outcome:
    return outlasts(
        START_LINE + b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{", b" ", BODY_PATIENCE
    )


def more_connections_than_descriptors() -> Outcome:
    """At the limit the service must not fill its log, and must answer again once the connections are gone."""
    with served(DOUBLES, limits=((resource.RLIMIT_NOFILE, 256),)) as stand:
        before = stand.printed.stat().st_size
        held: list[socket.socket] = []
        with suppress(OSError):
            for _ in range(400):
                held.append(opened(stand))
                held[-1].sendall(START_LINE)
        time.sleep(10)
        grown = (stand.printed.stat().st_size - before) / 1e6
        for connection in held:
            connection.close()
        stand.client.close()
        stand.client = type(stand.client)(timeout=10)
        back = until(stand.healthy, 30)
        got = f"{len(held)} connections: log grew by {grown:.2f} MB in 10 s, answers again: {back is not None}"
        return Outcome("log grows by less than 1 MB, answers again", got, grown < 1 and back is not None)


def others_are_answered_beside_idle_connections() -> Outcome:
    """Three hundred idle connections, and somebody with a key."""
    with served(DOUBLES) as stand:
        held = []
        with suppress(OSError):
            for _ in range(300):
                held.append(opened(stand))
                held[-1].sendall(START_LINE)
        began = time.monotonic()
        stand.client.close()
        stand.client = type(stand.client)(timeout=10)
        waited = until(stand.healthy, PATIENCE, 1.0)
        code = stand.draw().status_code if waited is not None else 0
        spent = time.monotonic() - began
        for connection in held:
            connection.close()
        got = f"{len(held)} idle ones: answer {code} after {spent:.1f} s"
        return Outcome(f"200 within {PATIENCE:.0f} s", got, code == 200 and spent < PATIENCE)


def a_request_line_without_end() -> Outcome:
    """A header of ten megabytes is refused, not collected."""
    stand = DOUBLE_SERVICE.get()
    connection = opened(stand)
    before, sent = stand.megabytes(), 0
    with suppress(OSError):
        connection.sendall(b"GET /")
        for _ in range(160):
            connection.sendall(b"a" * 65536)
            sent += 65536
    ended = until(lambda: closed(connection), 10) is not None
    grown = stand.megabytes() - before
    connection.close()
    got = f"closed: {ended} after {sent / 1e6:.1f} MB, memory grew by {grown:.0f} MB"
    return Outcome("closed, memory within 50 MB", got, ended and grown < 50 and stand.healthy())


ATTEMPTS = (
    a_half_open_header,
    a_header_byte_by_byte,
    nothing_at_all,
    a_body_byte_by_byte,
    a_body_byte_by_byte_without_a_key,
    more_connections_than_descriptors,
    others_are_answered_beside_idle_connections,
    a_request_line_without_end,
)
