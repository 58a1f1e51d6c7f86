"""Connections without a key: deadlines, counts and the log, tried with raw sockets on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import httpx
import pytest
import uvicorn
from services import bearer, make

from guardpaint.errors import BadConfig
from guardpaint.serve.app import create_app
from guardpaint.serve.connections import bounded, most_open, neighbourhood
from guardpaint.serve.quiet import SparingHandler
from guardpaint.serve.settings import Settings
from guardpaint.testing.doubles import AlwaysSafe

SHORT = {"header_time": 0.8, "body_time": 1.0, "idle_time": 0.6, "write_time": 0.8}
ASK = b"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


async def plain(scope, receive, send):
    """Reads a body and answers; /big with 30 MB, /early without reading, /slow in two seconds, listening meanwhile."""
    if scope["type"] != "http":
        return
    more = scope["path"] != "/early"
    while more:
        message = await receive()
        more = message.get("more_body", False)
    for _ in range(20 if scope["path"] == "/slow" else 0):
        with suppress(TimeoutError):
            await asyncio.wait_for(receive(), 0.1)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    size = 30 << 20 if scope["path"] == "/big" else 2
    await send({"type": "http.response.body", "body": b"x" * size})


@contextmanager
def listening(app=plain, **limits):
    """The application behind the service's own protocol; yields its port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **bounded(Settings(**SHORT | limits))))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def opened(port, first=b"", source="127.0.0.1"):
    client = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))
    if first:
        client.sendall(first)
    return client


def closed_within(client, seconds, drip=b"", pause=0.2):
    """Whether the server closes within this time; meanwhile `drip` is sent byte by byte."""
    end, heard = time.monotonic() + seconds, b""
    client.settimeout(pause)
    while time.monotonic() < end:
        try:
            if drip:
                client.sendall(drip[:1])
                drip = drip[1:]
            part = client.recv(65536)
            if not part:
                return True, heard
            heard += part
        except TimeoutError:
            continue
        except OSError:
            return True, heard
    return False, heard


def answered(port, source="127.0.0.1"):
    """The status of an ordinary request."""
    with opened(port, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", source) as client:
        heard = b""
        while part := client.recv(65536):
            heard += part
        return int(heard.split()[1])


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: ", b""),
        (b"GET / HTTP/1.1\r\nX-Slow: ", b"a" * 500),
        (ASK + b"Content-Length: 1000\r\n\r\n", b""),
        (ASK + b"Content-Length: 1000\r\n\r\n{", b" " * 500),
        (b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n", b" " * 500),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1 and on it goes" * 50),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n" * 500),
    ],
    ids=["silent", "half a header", "dripping header", "no body", "dripping body", "body after the answer", "idle",
         "idle, then dripping", "empty lines"],
)  # fmt: skip
def test_a_connection_without_a_whole_request_is_closed(first, drip):
    with listening() as port, opened(port, first) as client:
        closed, _ = closed_within(client, 9.0, drip)
        assert closed
        assert answered(port) == 200


def test_a_late_header_is_told_so():
    with listening() as port, opened(port, b"GET / HT") as client:
        closed, heard = closed_within(client, 5.0)
        head, _, body = heard.partition(b"\r\n\r\n")
        assert closed and head.startswith(b"HTTP/1.1 408") and json.loads(body)["error"]["code"] == "timeout"


def test_an_answer_may_take_longer_than_the_deadlines():
    with listening() as port, opened(port, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        client.settimeout(5)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_kept_connections_serve_one_request_after_another():
    with listening() as port, opened(port) as client:
        for _ in range(4):
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc")
            client.settimeout(5)
            heard = b""
            while not heard.endswith(b"0\r\n\r\n"):
                heard += client.recv(1000)
            assert heard.startswith(b"HTTP/1.1 200")
            time.sleep(0.4)


def test_a_client_that_never_reads_its_answer_is_dropped():
    """30 MB do not fit into the buffers of the sockets; the server must not keep them for ever."""
    with listening() as port:
        with opened(port) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n")
            time.sleep(4.0)
            client.settimeout(5)
            heard = 0
            with pytest.raises(ConnectionResetError):
                while part := client.recv(1 << 20):
                    heard += len(part)
                raise ConnectionResetError if heard < 30 << 20 else AssertionError
        assert httpx.get(f"http://127.0.0.1:{port}/big").content == b"x" * (30 << 20)


def test_requests_sent_ahead_are_bounded():
    with listening() as port, opened(port, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        client.settimeout(5)
        with pytest.raises(OSError, match=r"reset|pipe"):
            for _ in range(200):
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000)


def test_a_request_is_answered_while_hundreds_hold_connections():
    with listening(connections=40, address_connections=20, header_time=3.0) as port:
        idle = [opened(port, b"GET / HTTP/1.1\r\nX: ") for _ in range(300)]
        assert answered(port) == 200 and answered(port, "127.0.0.2") == 200
        began = time.monotonic()
        assert all(closed_within(c, 8.0, pause=1.0)[0] for c in idle) and time.monotonic() - began < 20
        for c in idle:
            c.close()


def test_an_address_has_its_share():
    """Requests in progress are not dropped for newcomers: those are refused, and other addresses are served."""
    with listening(connections=8, address_connections=4) as port:
        busy = [opened(port, b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(4)]
        time.sleep(0.3)
        with pytest.raises(OSError, match="reset"):
            answered(port)
        assert answered(port, "127.0.0.2") == 200
        for c in busy:
            c.settimeout(5)
            assert c.recv(100).startswith(b"HTTP/1.1 200")
            c.close()


@pytest.mark.parametrize(
    "raw",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET /" + b"a" * 90_000 + b" HTTP/1.1\r\n\r\n",
     b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"],
    ids=["no HTTP", "two hosts", "long URL", "no host", "negative length"],
)  # fmt: skip
def test_what_is_not_http_gets_the_documented_error(raw):
    with listening() as port, opened(port, raw) as client:
        _, heard = closed_within(client, 5.0)
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
        assert json.loads(body)["error"]["code"] == "invalid_http" and b"aaaa" not in body


def test_a_broken_body_ends_its_request():
    raw = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n"
    with listening() as port, opened(port, raw) as client:
        assert closed_within(client, 3.0)[0]
        assert answered(port) == 200


def test_the_service_itself_is_bounded():
    """A dripping body gets 408, also when every piece comes in time; a drawing may take as long as it needs."""
    service = make(AlwaysSafe(), body_time=1.0, slow_client=0.7)
    with listening(create_app(service)) as port:
        head = ASK + b"Authorization: " + bearer()["Authorization"].encode() + b"\r\nContent-Length: 500\r\n\r\n"
        with opened(port, head) as client:
            _, heard = closed_within(client, 4.0, b" " * 500)
        assert b" 408 " in heard.split(b"\r\n")[0] and b'"timeout"' in heard
        body = {"prompt": "a person", "num_inference_steps": 40}
        address = f"http://127.0.0.1:{port}/v1/images/generations"
        assert httpx.post(address, json=body, headers=bearer(), timeout=60).status_code == 200
        with httpx.stream("POST", address, json={**body, "stream": True}, headers=bearer(), timeout=60) as answer:
            events = [line for line in answer.iter_lines() if line.startswith("event:")]
        assert events[-1].endswith("completed")


def test_a_body_without_a_key_is_not_read():
    with listening(create_app(make())) as port, opened(port, ASK + b"Content-Length: 8000000\r\n\r\n") as client:
        client.settimeout(5)
        assert client.recv(100).startswith(b"HTTP/1.1 401")


# The log -----------------------------------------------------------------------------------------------------


def test_repeated_lines_are_counted_instead_of_written():
    class Sink(list):
        write, flush = list.append, lambda self: None

    sink, now = Sink(), [0.0]
    handler = SparingHandler(sink, burst=5, rate=1.0, clock=lambda: now[0])
    logger = logging.Logger("noisy")
    logger.addHandler(handler)
    for i in range(1000):
        logger.warning("line %d", i)
    logger.error("another place")
    assert len([t for t in sink if t.strip()]) == 6
    now[0] = 60.0
    logger.error("later")
    text = "".join(sink)
    summary = json.loads(next(line for line in text.splitlines() if "left_out" in line))
    assert summary["left_out"] == 995 and summary["logger"] == "noisy" and "line" not in str(summary["from"])
    assert "later" in text


FLOODED = """
import resource, sys, logging, uvicorn
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
sys.path.insert(0, {tests!r})
from guardpaint.serve.connections import bounded
from guardpaint.serve.quiet import log_to
from guardpaint.serve.settings import Settings
async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({{"type": "http.response.start", "status": 200, "headers": []}})
        await send({{"type": "http.response.body", "body": b"ok"}})
log_to(sys.stderr)
settings = Settings(header_time=2.0)
options = bounded(settings)
{hole}
uvicorn.run(app, port={port}, log_level="warning", **options)
"""


HOLE = """
crowd = options['http'].keywords['connections']
crowd.most = crowd.share = 9999
options['backlog'] = 2048
"""


def wait_for(port, server, seconds=120):
    """Wait until a starting service answers; a busy machine takes long to start it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert answered(port) == 200
            return
        except OSError:
            assert server.poll() is None, "the service ended while it started"
            assert time.monotonic() < deadline, f"no answer in {seconds} s"
            time.sleep(0.1)


@pytest.mark.parametrize("hole", ["", HOLE], ids=["counted", "not counted"])
def test_the_limit_of_open_files_is_not_reached_and_its_log_is_bounded(hole, tmp_path):
    """Idle connections against 400 open files. With the count taken out, the log must still stay small."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = FLOODED.format(tests=str(tmp_path), port=port, hole=hole)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-c", code], stderr=log)
    try:
        wait_for(port, server)
        idle = [opened(port) for _ in range(450 if hole else 260)]
        time.sleep(1.0)
        if not hole:
            assert answered(port) == 200
        time.sleep(2.0)
        for c in idle:
            c.close()
        time.sleep(1.5)
        assert answered(port) == 200
    finally:
        server.terminate()
        server.wait(20)
    text = (tmp_path / "log").read_text()
    assert len(text) < 400_000
    if not hole or find_spec("uvloop") is None:  # uvloop refuses connections without a word
        assert ("Too many open files" in text) == bool(hole), text[:2000]


def test_limits_of_connections():
    assert most_open(0, 1024) == 512 and most_open(0, 1 << 20) == 1024 and most_open(300, 1024) == 300
    with pytest.raises(BadConfig, match="connections=5000: .* 1024 open files"):
        most_open(5000, 1024)
    with pytest.raises(BadConfig, match="header_time=0"):
        Settings(header_time=0)
    assert neighbourhood("2001:db8:1:2:3::1") == neighbourhood("2001:db8:1:2:4::9") != neighbourhood("2001:db8:1:3::1")
    assert neighbourhood("::ffff:10.0.0.1") == neighbourhood("10.0.0.1") != neighbourhood("10.0.0.2")
    assert re.fullmatch(r"[0-9a-f:.]+", neighbourhood("10.0.0.1"))
