"""Guards of parts without training at every door: the command line, the service called by openai's client, Ray.

Each guard is saved to a folder first, and every door runs in a process of its own that loads it from there.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.errors import GuardPaintError
from guardpaint.guard import GuardPaint

Row = dict[str, Any]
COMMAND = (sys.executable, "-m", "guardpaint.cli")
BASE = ("--base", "tiny-sd", "--steps", "2", "--size", "32")
PATIENCE = 240.0
"""Seconds until a service must be answering."""


def by_command(folder: Path) -> str:
    """Draw with `guardpaint generate`; empty if the report is complete, else what is wrong."""
    words = [*COMMAND, "generate", "a quiet street", *BASE, "--guard", str(folder), "--out", str(folder / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        return f"exit code {done.returncode}: {done.stderr[-200:]}"
    report = json.loads(next((folder / "out").glob("*.json")).read_text())
    return "; ".join(report["errors"]) or ("" if report["final"]["verdict"] != "none" else "no final verdict")


def by_openai(address: str) -> str:
    """Ask for a picture with openai's own client."""
    import openai

    api = openai.OpenAI(api_key="unused", base_url=f"{address}/v1", max_retries=0, timeout=PATIENCE)
    try:
        answer = api.images.generate(prompt="a quiet street", n=1, response_format="b64_json", extra_body={"seed": 1})
    except openai.BadRequestError as error:
        return "" if error.code == "content_policy_violation" else f"{error.code}: {error}"
    except openai.OpenAIError as error:
        return f"{type(error).__name__}: {error}"[:200]
    png = base64.b64decode((answer.data or [])[0].b64_json or "")
    return "" if png[1:4] == b"PNG" else "the answer is no PNG"


@contextmanager
def served(folder: Path, *more: str) -> Iterator[str]:
    """`guardpaint serve` with a guard's folder, in a process of its own; the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    picture = folder / "white.png"
    Image.new("RGB", (64, 64), "white").save(picture)
    words = [*COMMAND, "serve", *BASE, "--guard", str(folder), "--port", str(port), "--weak", "calibration"]
    words += ["--weak", "scope"]
    with (folder / "served.txt").open("w") as log:
        process = subprocess.Popen([*words, "--self-test", str(picture), *more], stderr=log, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            wait(address, process, folder / "served.txt")
            yield address
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the service answers. Raises GuardPaintError if it ends or takes too long."""
    import httpx

    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise GuardPaintError(f"the service ended: {log.read_text()[-300:]}")
        try:
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise GuardPaintError(f"no answer within {PATIENCE:g} s: {log.read_text()[-300:]}")


def by_service(folder: Path, *more: str) -> str:
    """Draw over HTTP; what is wrong, or nothing."""
    try:
        with served(folder, *more) as address:
            return by_openai(address)
    except GuardPaintError as error:
        return str(error)


def doors(guards: dict[str, Callable[[], GuardPaint]]) -> list[Row]:
    """Every guard at the command line and behind the service; the first one on Ray too, if it is installed."""
    rows = []
    for i, (name, make) in enumerate(guards.items()):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make().save_pretrained(folder)
            ways: dict[str, Callable[[], str]] = {
                "command line": lambda folder=folder: by_command(folder),
                "openai client": lambda folder=folder: by_service(folder),
            }
            if i == 0 and find_spec("ray"):
                ways["Ray"] = lambda folder=folder: by_service(folder, "--ray")
            for door, way in ways.items():
                wrong = way()
                rows.append({"guard": name, "door": door, "ok": not wrong, "error": wrong})
                print(rows[-1], flush=True)
    return rows
