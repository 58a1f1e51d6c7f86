"""The page on which a person labels pictures with the keyboard, served to this machine only.

guardpaint data hand-label PICTURES --labeller ann --out labels.jsonl

Every label is written at once, so a stopped session goes on where it ended. The address holds a random token: other
programs of this machine, and pages of other sites, can neither see the pictures nor write labels.
"""

from __future__ import annotations

import io
import json
import secrets
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from PIL import Image

from guardpaint.data.hand_labels import (
    UNSURE,
    HandLabel,
    add_label,
    agreements,
    by_picture,
    categories_of,
    disputed,
    joined_label,
    read_labels,
)
from guardpaint.data.store import Corpus, key_of
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.images import as_rgb, load_bytes, load_image, read_bytes
from guardpaint.store.pages import render
from guardpaint.store.rows import read_rows

SIDE = 1024
"""Longest side in pixels of a picture on the page."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MOST_BYTES = 10_000
"""Longest answer that the page may send."""


@dataclass(frozen=True)
class Item:
    """A picture that waits for a label."""

    key: str
    load: Callable[[], Image.Image]
    case: str = ""
    """The kind of hard case that its source states."""


def find_items(place: Path, wanted: set[str] | None = None, count: int = 0) -> list[Item]:
    """The pictures of a corpus, of an evaluation's rows (`rows.jsonl`), or of a folder of image files.

    `wanted` names keys; `count` limits their number to a fixed random choice (0: all).
    """
    if place.is_file():
        items = row_items(place)
    elif (place / "images").is_dir() and any((place / "images").glob("*.parquet")):
        return corpus_items(Corpus(place), wanted, count)
    elif place.is_dir():
        items = folder_items(place)
    else:
        raise BadInput(f"{place}: no such corpus, rows file or folder of pictures")
    chosen = chosen_keys([item.key for item in items], wanted, count)
    return [item for item in items if item.key in chosen]


def chosen_keys(keys: Sequence[str], wanted: set[str] | None, count: int) -> set[str]:
    """The keys to label. Raises BadInput if none is left, or if a wanted one does not exist."""
    unknown = sorted((wanted or set()) - set(keys))
    if unknown:
        raise BadInput(f"no picture with the key {unknown[0]!r}")
    found = sorted({k for k in keys if wanted is None or k in wanted}, key=sha256_hex)
    if not found:
        raise BadInput("no pictures to label")
    return set(found[: count or None])


def corpus_items(corpus: Corpus, wanted: set[str] | None, count: int) -> list[Item]:
    """Chosen pictures of a corpus, with their source as the case. Their files stay in memory."""
    chosen = chosen_keys(sorted(corpus.keys()), wanted, count)
    return [Item(e.key, e.picture, e.source) for e in corpus if e.key in chosen]


def folder_items(folder: Path) -> list[Item]:
    """Pictures of a folder, with the name of their own folder as the case; keys are those of a corpus."""
    items = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES):
        data = read_bytes(path)
        case = path.parent.name if path.parent != folder else ""
        items[key_of(data)] = Item(key_of(data), lambda path=path: load_bytes(read_bytes(path), str(path)), case)  # type: ignore[misc]
    return list(items.values())


def row_items(file: Path) -> list[Item]:
    """The kept pictures of an evaluation, by the keys of their rows. The page says nothing of what a row says."""
    items = {}
    for number, row in enumerate(read_rows(file), 1):
        key, image = row.get("key"), row.get("image")
        if not isinstance(key, str) or not isinstance(image, str | None):
            raise BadInput(f"{file}:{number}: needs a key and an image, the path of a picture beside this file")
        if image:
            path = (file.parent / image).resolve()
            items[key] = Item(key, lambda path=path: load_image(path))  # type: ignore[misc]
    if not items:
        raise BadInput(f"{file}: no row has a kept picture")
    return list(items.values())


@dataclass(frozen=True)
class Session:
    """One labeller's work on a set of pictures."""

    items: Sequence[Item]
    policy: Policy
    labeller: str
    out: Path
    cases: Sequence[str] = ()
    """Kinds of hard cases that the labeller can choose from."""
    several: bool = False
    """Whether a picture may get several categories."""
    settling: bool = False
    """Whether the labels decide disagreements of other labellers."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    lock: Any = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        if not self.labeller.strip():
            raise BadInput("--labeller: give a name")
        if not self.items:
            raise BadInput("no pictures to label")

    @cached_property
    def pictures(self) -> dict[str, Item]:
        return {item.key: item for item in self.items}

    @cached_property
    def order(self) -> list[str]:
        """The keys in an order of this labeller's own, so that neither rank nor source shows."""
        return sorted(self.pictures, key=lambda key: sha256_hex(self.labeller + key))

    def labels(self) -> list[HandLabel]:
        """All labels of the file."""
        return read_labels(self.out, self.policy)

    def own(self, labels: Sequence[HandLabel]) -> dict[str, HandLabel]:
        """This labeller's labels of these pictures, by key."""
        mine = (x for x in labels if x.labeller == self.labeller and x.settled == self.settling)
        return {x.key: x for x in mine if x.key in self.pictures}

    def state(self) -> dict[str, Any]:
        """What the page needs to go on: pictures in order, own labels, and how far labellers agree."""
        labels = self.labels()
        own = self.own(labels)
        said = by_picture(labels) if self.settling else {}
        return {
            "items": [
                {
                    "key": key,
                    "case": self.pictures[key].case,
                    "said": [f"{x.labeller}: {x.label}" for x in said.get(key, ())],
                }
                for key in self.order
            ],
            "own": {key: {"labels": categories_of(x.label), "case": x.case} for key, x in own.items()},
            "agreement": [a.text() for a in agreements(labels)],
            "disputed": len(disputed(labels)),
        }

    def record(self, answer: Any) -> dict[str, Any]:
        """Write the label that the page sent, and return how far labellers agree now."""
        try:
            key, names, case = str(answer["key"]), [str(n) for n in answer["labels"]], str(answer.get("case") or "")
            seconds = float(answer.get("seconds") or 0.0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"not an answer of the page ({error!r})") from error
        if key not in self.pictures:
            raise BadInput(f"no picture with the key {key!r}")
        if len(names) > 1 and not self.several:
            raise BadInput("one category per picture; start with --several for more")
        label = joined_label(names, self.policy)
        with self.lock:
            row = HandLabel(key, self.labeller, label, case[:80], round(seconds, 2), self.settling)
            add_label(self.out, row)
            state = self.state()
        return {"agreement": state["agreement"], "disputed": state["disputed"]}

    def page(self) -> str:
        """The page."""
        return render(
            "label.html.j2",
            title=f"GuardPaint: labels by {self.labeller}",
            labeller=self.labeller,
            categories=self.policy.categories,
            unsure=UNSURE,
            cases=list(self.cases),
            several=self.several,
            settling=self.settling,
        )

    def shown(self, key: str) -> bytes:
        """A picture as PNG, at most SIDE pixels long."""
        image = as_rgb(self.pictures[key].load())
        image.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def left(self) -> int:
        """How many pictures this labeller has not labelled."""
        return len(self.pictures) - len(self.own(self.labels()))


def open_session(session: Session) -> Session:
    """The session, and when settling only with the pictures on which labellers disagree."""
    if not session.settling:
        session.labels()  # a file that is no file of labels is named before anybody works
        return session
    open_keys = set(disputed(session.labels()))
    items = [item for item in session.items if item.key in open_keys]
    if not items:
        raise BadInput(f"{session.out}: the labellers disagree on none of these pictures")
    return replace(session, items=items)


class PageHandler(BaseHTTPRequestHandler):
    """Answers the page's requests; anything without the token is not found."""

    session: Session

    def do_GET(self) -> None:
        path = self.inner()
        session = self.session
        if path == "":
            self.reply(session.page().encode(), "text/html; charset=utf-8")
        elif path == "state":
            self.answer(session.state)
        elif path is not None and path.startswith("picture/") and path.removeprefix("picture/") in session.pictures:
            try:
                self.reply(session.shown(path.removeprefix("picture/")), "image/png")
            except BadInput as error:
                self.reply(str(error).encode(), "text/plain; charset=utf-8", HTTPStatus.UNPROCESSABLE_ENTITY)
        else:
            self.reply(b"not found", "text/plain", HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.inner() != "label":
            return self.reply(b"not found", "text/plain", HTTPStatus.NOT_FOUND)
        if not length.isdigit() or int(length) > MOST_BYTES:
            return self.reply(b"too long", "text/plain", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(int(length))
        return self.answer(lambda: self.session.record(json.loads(body)))

    def inner(self) -> str | None:
        """The path after the token, or None without the token."""
        start = f"/{self.session.token}/"
        return self.path.removeprefix(start) if self.path.startswith(start) else None

    def answer(self, call: Callable[[], Mapping[str, Any]]) -> None:
        """What a call returns, as JSON; what it refuses, as its message."""
        try:
            self.reply(json.dumps(call()).encode(), "application/json")
        except (BadInput, ValueError, OSError) as error:
            self.reply(str(error).encode(), "text/plain; charset=utf-8", HTTPStatus.BAD_REQUEST)

    def reply(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: the address holds the token."""


def page_server(session: Session, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server of the page on this machine (port 0: any free one), and the page's address."""
    handler = type("SessionHandler", (PageHandler,), {"session": open_session(session)})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise BadInput(f"port {port}: {error.strerror}; choose another with --port") from error
    server.daemon_threads = True
    return server, f"http://127.0.0.1:{server.server_address[1]}/{session.token}/"


def serve(session: Session, port: int, browser: bool, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `say` gets its address, and a browser opens it if wanted."""
    server, address = page_server(session, port)
    say(f"{session.left()} of {len(session.items)} pictures to label: {address}  (Ctrl-C to end)")
    if browser:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
