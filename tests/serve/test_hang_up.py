"""Clients that hang up: their pictures are given up promptly, in the queue and while they are drawn."""

from __future__ import annotations

import json
import socket
import time

import pytest
from helpers import serving
from services import bearer, make

from guardpaint.serve.app import create_app


@pytest.fixture
def service():
    made = make(batch=1, queue=2, linger=0.0)
    with serving(create_app(made)) as address:
        yield made, address


def ask(address, steps):
    """Send a request on a socket of its own; closing the socket is hanging up."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a person", "num_inference_steps": steps, "size": "128x128"}).encode()
    head = {**bearer(), "Host": "x", "Content-Type": "application/json", "Content-Length": len(body)}
    client = socket.create_connection((host, int(port)), timeout=10)
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    client.sendall(f"POST /v1/images/generations HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return client


def until(true, seconds):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_a_picture_is_given_up_while_it_is_drawn(service):
    made, address = service
    client = ask(address, 100)
    assert until(lambda: made.worker.busy == 1, 10)
    began = time.monotonic()
    client.close()
    assert until(lambda: made.worker.depth == 0, 20)
    assert time.monotonic() - began < 1.0
    assert made.metrics.text().count(b'status="clean"') == 0, "it was not finished"


def test_a_place_in_the_queue_is_freed(service):
    made, address = service
    drawn = ask(address, 100)
    assert until(lambda: made.worker.busy == 1, 10)
    waiting = [ask(address, 100) for _ in range(2)]
    assert until(lambda: made.worker.depth == 3, 10)
    for client in waiting:
        client.close()
    assert until(lambda: made.worker.depth == 1, 2)
    assert made.worker.busy == 1
    drawn.close()
    assert until(lambda: made.worker.depth == 0, 2)
