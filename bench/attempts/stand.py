"""Starts real `guardpaint serve` processes on loopback and shows what can be seen of them from outside.

Two kinds of base: `DOLLS`, an embedded one with the embedded guard, and staged ones with an auditor that does what the
prompt says (`plugin/redteam_bases.py`), which draw in milliseconds.
"""

from __future__ import annotations

import base64
import io
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from attempts.processes import family_tree, resident

HERE = Path(__file__).parent
DOLLS, DOUBLES, SLOW, CRASHING = "mini-sd", "redteam-doubles", "redteam-slow", "redteam-crashing"
STAGED = {DOUBLES: "doubles", SLOW: "slow", CRASHING: "crashing"}
USER, OTHER, OPERATOR = "redteam-user-secret-1", "redteam-user-secret-2", "redteam-operator-sec-3"
KEYS = {
    USER: {"name": "ann", "role": "user", "per_minute": 1_000_000},
    OTHER: {"name": "bob", "role": "user", "per_minute": 1_000_000},
    OPERATOR: {"name": "olga", "role": "operator", "per_minute": 1_000_000},
}
GREY = Image.new("RGB", (64, 64), (115, 115, 115))
"""The picture that a staged auditor flags."""
START = 150.0
"""Seconds that a service may take to start on a busy machine."""
SIGNING = b"redteam-signing-key"


class Refused(Exception):
    """The service stopped before it listened; the message is its output."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(output)
        self.code, self.output = code, output


@dataclass
class Stand:
    """One running service and its folder."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    """Where its files are."""
    log: Path
    """Its audit log, if it keeps one."""
    printed: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=180))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, secret: str | None = USER, **more: Any) -> httpx.Response:
        headers = {**({"Authorization": f"Bearer {secret}"} if secret else {}), **more.pop("headers", {})}
        return self.client.request(method, self.address + path, headers=headers, **more)

    def get(self, path: str, secret: str | None = USER, **more: Any) -> httpx.Response:
        return self.send("GET", path, secret, **more)

    def draw(self, prompt: str = "a person on the beach", secret: str | None = USER, **body: Any) -> httpx.Response:
        fields = {"prompt": prompt, "seed": 1, **body}
        timeout = fields.pop("timeout", 180)
        return self.send("POST", "/v1/images/generations", secret, json=fields, timeout=timeout)

    def audit(self, data: bytes, name: str = "upload.png", secret: str | None = USER) -> httpx.Response:
        return self.send("POST", "/v1/audits", secret, files={"image": (name, data, "application/octet-stream")})

    def report_id(self, answer: httpx.Response) -> str:
        """The report of the first picture of an answer, released or not."""
        body = answer.json()
        first = body["data"][0]["safety"] if "data" in body else body["error"]["safety"][0]
        return str(first["report"])

    def output(self) -> str:
        """What the service has printed so far."""
        return self.printed.read_text(errors="replace")

    def healthy(self) -> bool:
        try:
            return self.get("/health", None, timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def anchor(self) -> Path:
        return self.folder / "anchor.json"

    def tree(self) -> list[int]:
        """The service's process and everything that it started."""
        return family_tree(self.process.pid)

    def memory(self) -> dict[int, float]:
        """Resident memory of each process of the tree that holds a model or a server, in MB."""
        return {pid: m for pid in self.tree() if (m := resident(pid)) > 60}

    def megabytes(self) -> float:
        """Resident memory of the whole tree."""
        return sum(map(resident, self.tree()))

    def drawing(self) -> int | None:
        """The largest of the processes that the service started; None if it draws in its own."""
        others = [p for p in self.tree()[1:] if resident(p) > 100]
        return max(others, key=resident, default=None)


def released(answer: httpx.Response) -> bool:
    """Whether an answer of any kind holds a picture."""
    return '"b64_json":"' in answer.text.replace(" ", "")


def pictures(answer: httpx.Response) -> list[Image.Image]:
    """The pictures of an answer."""
    data = answer.json().get("data", []) if answer.status_code == 200 else []
    shown = [base64.b64decode(i["b64_json"]) for i in data if i.get("b64_json")]
    return [Image.open(io.BytesIO(raw)).convert("RGB") for raw in shown]


def encoded(image: Image.Image, form: str = "PNG", **more: Any) -> bytes:
    """The picture as a file of a format. Pillow leaves an encoder's settings in what it saves, so a copy is saved."""
    buffer = io.BytesIO()
    image.copy().save(buffer, form, **more)
    return buffer.getvalue()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def register(folder: Path) -> None:
    """Describe the staged bases as an installed package, for processes that have `folder` on their path."""
    package = folder / "redteam_bases-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: redteam-bases\nVersion: 0\n")
    points = "".join(f"{name} = redteam_bases:{what}\n" for name, what in STAGED.items())
    (package / "entry_points.txt").write_text(f"[guardpaint.bases]\n{points}")


def environment(folder: Path) -> dict[str, str]:
    """Environment of a process that knows the staged bases, uses one thread and reaches no hub."""
    if not (folder / "packages").exists():
        register(folder / "packages")
    paths = [str(folder / "packages"), str(HERE / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(*words: str, folder: Path, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a `guardpaint` command to its end."""
    line = [sys.executable, "-m", "guardpaint.cli", *words]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=timeout, env={**environment(folder), **env}, check=False
    )


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="redteam-") as name:
        yield Path(name)


@dataclass
class Options:
    """How a service is started."""

    base: str = DOUBLES
    logged: bool = False
    """With an audit log, a key and an anchor in the service's folder."""
    disk: Path | None = None
    """Another folder for the log itself."""
    keyed: bool = True
    """With API keys."""
    more: tuple[str, ...] = ()
    limits: tuple[tuple[int, int], ...] = ()
    """Resource limits of the process, as (resource, value)."""
    env: dict[str, str] = field(default_factory=dict)


def arguments(options: Options, folder: Path) -> list[str]:
    """The options of `guardpaint serve`, whose files are written into the folder."""
    out = ["--base", options.base, *options.more]
    if options.keyed:
        (folder / "keys.json").write_text(json.dumps(KEYS))
        out += ["--keys", str(folder / "keys.json")]
    if options.base in STAGED and "--self-test" not in options.more:
        GREY.save(folder / "known-bad.png")
        out += ["--self-test", str(folder / "known-bad.png")]
    if options.logged:
        (folder / "hmac.key").write_bytes(SIGNING)
        out += ["--audit-log", str((options.disk or folder) / "audit.jsonl"), "--key-file", str(folder / "hmac.key")]
        out += ["--anchor", str(folder / "anchor.json")]
    return out


def start(options: Options, folder: Path) -> Stand:
    """Start a service and wait until it listens; raises Refused if it stops before that."""
    port, printed = free_port(), folder / f"printed-{secrets.token_hex(3)}.txt"
    line = [sys.executable, "-m", "guardpaint.cli", "serve", "--port", str(port), *arguments(options, folder)]

    def confine() -> None:
        for what, value in options.limits:
            resource.setrlimit(what, (value, value))

    with printed.open("wb") as out:
        process = subprocess.Popen(
            line,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment(folder), **options.env},
            preexec_fn=confine if options.limits else None,
            start_new_session=True,
        )
    stand = Stand(process, port, folder, (options.disk or folder) / "audit.jsonl", printed)
    deadline = time.monotonic() + START
    while not stand.healthy():
        if process.poll() is not None:
            raise Refused(process.returncode, stand.output())
        if time.monotonic() > deadline:
            stop(stand)
            raise TimeoutError(f"the service did not start in {START:g} s: {stand.output()[-500:]}")
        time.sleep(0.2)
    return stand


def stop(stand: Stand, patience: float = 20.0) -> None:
    """End a service and everything that it started."""
    stand.client.close()
    tree = stand.tree()
    stand.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        stand.process.wait(patience)
    for pid in tree:
        with suppress(ProcessLookupError):
            if resident(pid) and (pid == stand.process.pid or Path(f"/proc/{pid}").exists()):
                os.kill(pid, signal.SIGKILL)
    stand.process.wait(10)


@contextmanager
def served(base: str = DOUBLES, folder: Path | None = None, **options: Any) -> Iterator[Stand]:
    """A service inside a with block, in a folder of its own unless one is given."""
    with scratch() as own:
        stand = start(Options(base, **options), folder or own)
        try:
            yield stand
        finally:
            stop(stand)


# Services that several attempts share ------------------------------------------------------------------------


class Shared:
    """One service for attempts that leave it as it was; started on first use, and again if it has died."""

    def __init__(self, **options: Any) -> None:
        self.options, self.lock = Options(**options), threading.Lock()
        self.stand: Stand | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def get(self) -> Stand:
        with self.lock:
            if self.stand is not None and not self.stand.healthy():
                self.close()
            if self.stand is None:
                self.folder = tempfile.TemporaryDirectory(prefix="redteam-")
                self.stand = start(self.options, Path(self.folder.name))
            return self.stand

    def close(self) -> None:
        if self.stand is not None and self.folder is not None:
            stop(self.stand)
            self.folder.cleanup()
        self.stand = self.folder = None


DOUBLE_SERVICE, SLOW_SERVICE, DOLL_SERVICE = Shared(base=DOUBLES), Shared(base=SLOW), Shared(base=DOLLS)
SHARED = (DOUBLE_SERVICE, SLOW_SERVICE, DOLL_SERVICE)
