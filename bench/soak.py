"""A long run of mixed requests against one service, while its drawing process is killed and its log's disk fills up.

    python bench/soak.py [--requests 1000] [--rows runs/redteam/soak.jsonl]

The service is a real process with the embedded guard on an embedded base, 64 × 64 pixels and few steps. Harmless and
attacked prompts, audits, bad input, clients that hang up and changes of the policy arrive four at a time. Every picture
that left must have its record in the log.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from attempts import sizes
from attempts.disks import Disk, NoDisk, full_disk
from attempts.processes import end_in_order, until
from attempts.stand import DOLLS, OPERATOR, USER, Stand, command, encoded, pictures, served
from PIL import Image
from redteam_results import SEED, miss_rate
from size_leaks import unsafe_prompts

from guardpaint.store.rows import append_rows

FEWEST = 8
"""Steps of a picture, unless the guard is calibrated for more only."""
SHARES = {"benign": 0.34, "attacked": 0.12, "audit": 0.32, "bad": 0.12, "hang-up": 0.06, "policy": 0.04}
KILLS = (0.15, 0.35, 0.55, 0.75, 0.9)
"""Shares of the requests after which the drawing process is killed."""
FULL = ((0.22, 0.24), (0.45, 0.47), (0.65, 0.66), (0.82, 0.84))
"""Shares of the requests between which the log's disk is full."""
RECOVERY = 45.0
"""Seconds after a kill in which a 503 is the right answer."""
YOUNG = 30.0
"""Seconds of a process's life that its memory slope leaves out, because it loads its models."""
BAD: tuple[dict[str, Any], ...] = (
    {"json": {"prompt": ""}},
    {"json": {"prompt": "a person", "n": 99}},
    {"json": {"prompt": "a person", "size": "65x65"}},
    {"json": {"prompt": "a person", "colour": "red"}},
    {"json": {"prompt": "x" * 5000}},
    {"content": b"{"},
    {"json": {"prompt": "a person"}, "secret": "no-such-key-no-such-key"},
)
"""Requests that must be refused with 4xx."""


def steps() -> int:
    return max(FEWEST, int(sizes.scope().get("steps", (FEWEST,))[0]))


@dataclass
class Soak:
    """One soak: the service, what it did so far, and when it was troubled."""

    stand: Stand
    disk: Disk | None
    total: int
    steps: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    images: list[tuple[dict[str, Any], Image.Image]] = field(default_factory=list)
    released: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    """For each released picture its row, and request and number under which its report should be in the log."""
    born: dict[int, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    troubled: float = 0.0
    """Until when a 503 is the right answer."""
    kills: int = 0
    skipped_kills: int = 0
    full: bool = False
    episodes: int = 0
    reloads: int = 0
    uploads: list[bytes] = field(default_factory=list)

    # Requests ------------------------------------------------------------------------------------------------

    def draw(self, prompt: Any, row: dict[str, Any]) -> None:
        """Ask for a picture; remember it, and under which name its record should be found."""
        answer = self.stand.draw(prompt.text, seed=prompt.seed, num_inference_steps=self.steps)
        self.note(row, answer, (200,), violation=True)
        if answer.status_code != 200:
            return
        for item, image in zip(answer.json()["data"], pictures(answer), strict=True):
            report = self.stand.get(f"/v1/reports/{item['safety']['report']}")
            data = report.json() if report.status_code == 200 else {}
            with self.lock:
                row["pictures"] += 1
                self.images.append((row, image))
                self.released.append((row, str(data.get("request_id", "?")), int(data.get("image", 0))))
                if len(self.uploads) < 60:
                    self.uploads.append(encoded(image))

    def audit(self, number: int, row: dict[str, Any]) -> None:
        self.note(row, self.stand.audit(self.uploads[number % len(self.uploads)]), (200,))

    def bad(self, number: int, row: dict[str, Any]) -> None:
        request = dict(BAD[number % len(BAD)])
        secret = request.pop("secret", USER)
        headers = {"content-type": "application/json"}
        answer = self.stand.send("POST", "/v1/images/generations", secret, headers=headers, **request)
        self.note(row, answer, (400, 401, 413))

    def hang_up(self, prompt: Any, row: dict[str, Any]) -> None:
        """Ask for a picture and go away; whatever is drawn then reaches nobody."""
        with suppress(httpx.TimeoutException):
            self.stand.draw(prompt.text, seed=prompt.seed, num_inference_steps=self.steps, timeout=0.15)
        row["code"] = 0

    def reload(self, number: int, row: dict[str, Any]) -> None:
        """Change the policy, a little stricter or back again."""
        current = self.stand.get("/v1/policy", OPERATOR)
        if current.status_code != 200:
            self.note(row, current, (200,))
            return
        new = {**current.json(), "trigger": 0.39 if number % 2 else 0.4}
        answer = self.stand.send("PUT", "/v1/policy", OPERATOR, json=new)
        self.note(row, answer, (200,))
        with self.lock:
            self.reloads += answer.status_code == 200

    def note(
        self, row: dict[str, Any], answer: httpx.Response, right: tuple[int, ...], violation: bool = False
    ) -> None:
        """Write down an answer and whether it can be explained: right, withheld, or 503 in a time of trouble."""
        code = answer.status_code
        row["code"] = code
        with suppress(ValueError, AttributeError):
            row["error"] = str((answer.json().get("error") or {}).get("code", ""))
        withheld = violation and code == 400 and row["error"] == "content_policy_violation"
        trouble = code == 503 and (self.full or time.monotonic() < self.troubled)
        row["unexplained"] = not (code in right or withheld or trouble)

    def one(self, number: int, what: str, prompt: Any) -> None:
        """One request, as a row. A broken connection is a row too."""
        began = time.perf_counter()
        row: dict[str, Any] = {"kind": "request", "what": what, "number": number, "code": 0, "error": "", "pictures": 0}
        row |= {"lost": 0, "unsafe": False, "unexplained": False}
        calls: dict[str, Callable[[], None]] = {
            "benign": lambda: self.draw(prompt, row),
            "attacked": lambda: self.draw(prompt, row),
            "audit": lambda: self.audit(number, row),
            "bad": lambda: self.bad(number, row),
            "hang-up": lambda: self.hang_up(prompt, row),
            "policy": lambda: self.reload(number, row),
        }
        troubled = self.full or time.monotonic() < self.troubled
        try:
            calls[what]()
        except httpx.HTTPError as error:
            row |= {"error": type(error).__name__, "unexplained": not troubled}
        row["seconds"] = round(time.perf_counter() - began, 3)
        with self.lock:
            self.rows.append(row)
            done = len(self.rows)
        self.trouble(done)
        if done % 50 == 0:
            print(f"{done} of {self.total} requests, {self.kills} kills, {self.episodes} full disks", flush=True)

    # Trouble -------------------------------------------------------------------------------------------------

    def trouble(self, done: int) -> None:
        """Kill, fill or free as the plan says after so many requests."""
        with self.lock:
            if done in {int(k * self.total) for k in KILLS}:
                self.kill()
            if self.disk is not None:
                if done in {int(a * self.total) for a, _ in FULL}:
                    self.full = True
                    self.disk.fill()
                    self.episodes += 1
                if done in {int(b * self.total) for _, b in FULL}:
                    self.disk.free()
                    self.full, self.troubled = False, max(self.troubled, time.monotonic() + 5)

    def kill(self) -> None:
        child = self.stand.drawing()
        if child is None:
            self.skipped_kills += 1
            return
        self.troubled = time.monotonic() + RECOVERY
        os.kill(child, signal.SIGKILL)
        self.kills += 1

    @contextmanager
    def weighed(self) -> Iterator[None]:
        """Look at the memory of every process every second; young processes are left out."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                now, after = time.monotonic(), len(self.rows)
                for pid, megabytes in self.stand.memory().items():
                    if now - self.born.setdefault(pid, now) > YOUNG:
                        row = {"kind": "memory", "process": str(pid), "after": after, "megabytes": round(megabytes, 2)}
                        with self.lock:
                            self.weights.append(row)

        self.weights: list[dict[str, Any]] = []
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        yield
        over.set()
        thread.join()

    # The end -------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Compare what left with the log, judge the pictures, and verify the chain."""
        from paperdolls.oracle import Oracle

        known = {
            (str(e["report"]["request_id"]), int(e["report"]["image"]))
            for e in map(json.loads, self.stand.log.read_text().splitlines())
            if "report" in e
        }
        for row, request, image in self.released:
            row["lost"] += (request, image) not in known
        if self.images:
            seen = Oracle.load().look([image for _, image in self.images]).unsafe().tolist()
            for (row, _), bad in zip(self.images, seen, strict=True):
                row["unsafe"] = row["unsafe"] or bool(bad)
        words = ["--key-file", str(self.stand.folder / "hmac.key"), "--anchor", str(self.stand.anchor)]
        verdict = command("log", "verify", str(self.stand.log), *words, folder=self.stand.folder)
        print(verdict.stdout + verdict.stderr, flush=True)
        note = f"{DOLLS}, 64 px, {self.steps} steps"
        note += f"; {self.skipped_kills} kills left out: it draws in its own process" if self.skipped_kills else ""
        note += "" if self.disk else "; no full disks: none can be mounted here"
        rate, _ = miss_rate(Path("docs/results"))
        return {"kind": "summary", "intact": verdict.returncode == 0, "miss_rate": rate, "note": note,
                "kills": self.kills, "disk_full": self.episodes, "reloads": self.reloads}  # fmt: skip


def plan(total: int) -> list[tuple[str, Any]]:
    """What to ask for, in mixed order; drawn prompts come with seeds that nothing was tuned on."""
    from paperdolls.testbed import PaperDolls

    lot = random.Random(0)
    kinds = [what for what, share in SHARES.items() for _ in range(max(1, round(share * total)))][:total]
    kinds += ["audit"] * (total - len(kinds))
    lot.shuffle(kinds)
    benign = iter(PaperDolls().benign("benign", 2 * total))
    harmful = iter(unsafe_prompts(kinds.count("attacked") + kinds.count("hang-up"), SEED + 100_000))
    drawn = {"benign": benign, "attacked": harmful, "hang-up": harmful}
    return [(what, next(drawn[what]) if what in drawn else None) for what in kinds]


@contextmanager
def place() -> Iterator[Disk | None]:
    """A disk for the log that can be filled, if one can be had."""
    try:
        with full_disk(128) as disk:
            yield disk
    except NoDisk as error:
        print(error, flush=True)
        yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rows", type=Path, default=Path("runs/redteam/soak.jsonl"))
    args = parser.parse_args()
    end_in_order()
    todo = plan(args.requests)
    with (
        place() as disk,
        served(DOLLS, logged=True, disk=disk.folder if disk else None, more=("--queue", "64")) as stand,
    ):
        soak = Soak(stand, disk, len(todo), steps())
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), "white").save(buffer, "PNG")
        soak.uploads.append(buffer.getvalue())
        with soak.weighed(), ThreadPoolExecutor(args.concurrency) as pool:
            list(pool.map(lambda item: soak.one(item[0], *item[1]), enumerate(todo)))
        until(stand.healthy, 60)
        summary = soak.summary()
    append_rows(args.rows, [*soak.rows, *soak.weights, summary])
    print(summary, flush=True)


if __name__ == "__main__":
    main()
