"""Random inputs for a running service: damaged uploads and strange JSON bodies, and with them files that it reads.

    python bench/fuzz.py [--inputs 10000] [--rows runs/redteam/fuzz.jsonl]

Hypothesis makes the inputs. The service is a real process that draws with small random weights and a staged auditor, so
that thousands of answers take minutes. An answer over 499, a traceback, or memory that keeps growing is a fault. So
that more than the readers of formats is tried, a fair share of the inputs must get as far as the auditor: `answered`
in a row is the share with status 200.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from attempts.processes import end_in_order
from attempts.stand import DOUBLES, GREY, OPERATOR, USER, Stand, encoded, served
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image, features
from redteam_results import slope

from guardpaint.store.rows import append_rows

SEED = 20
EVERY = 50
"""Inputs between two looks at the memory."""
ENOUGH = 1000
"""Inputs from which on a growth of memory says something."""
SHOWN = 5
"""Faulty inputs that a row describes."""
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
"""As large as the smallest picture that the embedded guard answers for; a smaller one never reaches the auditor."""


def each(inputs: st.SearchStrategy[Any], count: int, use: Callable[[Any], None]) -> None:
    """Call a function with `count` different inputs. It must not raise: every input is used once, none is shrunk."""

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def one(value: Any) -> None:
        use(value)

    one()


# Uploads -----------------------------------------------------------------------------------------------------


def files() -> list[tuple[str, bytes]]:
    """A small picture in many formats, taken and not taken ones, and in several modes."""
    found = [(f"a.{form.lower()}", encoded(PICTURE, form)) for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")]
    found += [("a.tiff", encoded(PICTURE, "TIFF", compression=c)) for c in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")]
    found += [("a.png", encoded(PICTURE.convert(mode))) for mode in ("1", "L", "LA", "RGBA", "P", "I;16")]
    found += [("a.gif", encoded(PICTURE, "GIF", save_all=True, append_images=[GREY.resize(PICTURE.size)]))]
    found += [
        ("a.jpg", encoded(PICTURE.convert("CMYK"), "JPEG")),
        ("a.jpg", encoded(PICTURE, "JPEG", progressive=True)),
    ]
    found += [
        (f"a.{form.lower()}", encoded(PICTURE, form)) for form in ("DDS", "IM", "PPM", "TGA", "ICO", "EPS", "PCX")
    ]
    return found + ([("a.avif", encoded(PICTURE, "AVIF"))] if features.check("avif") else [])


FILES = files()
HEADER = 64
TOUGH = [f for f in FILES if f[0].endswith(("bmp", "jpeg", "jpg", "gif"))]
"""Files without checksums: a change behind the header gives other pixels, not an error."""
EDGES = [b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file with some bytes replaced, a piece cut out, doubled or taken from another file, or the end missing.

    A quarter are files whose pixels alone are changed, so that they are decoded and audited.
    """
    if draw(st.integers(0, 3)) == 0:
        name, data = draw(st.sampled_from(TOUGH))
        where = draw(st.integers(len(data) // 2, len(data) - HEADER))
        return name, data[:where] + (piece := draw(st.binary(min_size=1, max_size=4))) + data[where + len(piece) :]
    name, data = draw(st.sampled_from(FILES))
    broken = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.integers(0, min(len(broken), HEADER) if draw(st.booleans()) else len(broken)))
        how = draw(st.sampled_from(("write", "write", "edge", "cut", "insert", "splice", "end")))
        if how == "write":
            piece = draw(st.binary(min_size=1, max_size=4))
            broken[where : where + len(piece)] = piece
        elif how == "edge":
            piece = draw(st.sampled_from(EDGES))
            broken[where : where + len(piece)] = piece
        elif how == "cut":
            del broken[where : where + draw(st.integers(1, 32))]
        elif how == "insert":
            broken[where:where] = draw(st.binary(max_size=16))
        elif how == "splice":
            broken[where:] = draw(st.sampled_from(FILES))[1][where:]
        else:
            del broken[where:]
    return draw(st.sampled_from((name, name, "", "x" * 300, "a\0.png", "../a.png"))), bytes(broken)


def send_upload(stand: Stand, upload: tuple[str, bytes]) -> httpx.Response:
    return stand.audit(upload[1], upload[0] or "a")


# JSON bodies -------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([-(2**63), 2**31, 2**63, 10**40, 1e308, -1e308, 0.1, -0.0]),
    st.text(max_size=12),
    st.sampled_from(["", "auto", "64x64", "00x00", "9999x9999", "1e9", "nan", "\ud800", "\0", "𝕏" * 40, "' OR 1=1"]),
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=6
)
FIELDS = ("prompt", "model", "n", "size", "response_format", "seed", "num_inference_steps", "guidance_scale", "stream",
          "user", "quality", "output_format", "moderation", "partial_images")  # fmt: skip
FEW = {"n": SCALARS, "num_inference_steps": SCALARS, "stream": SCALARS}
"""Fields whose valid values cost time are drawn from small numbers only."""
SOUND = st.fixed_dictionaries(
    {"prompt": st.text(min_size=1, max_size=30)},
    optional={
        "n": st.integers(1, 2),
        "seed": st.integers(0, 2**53),
        "response_format": st.sampled_from(("b64_json", "url")),
        "stream": st.booleans(),
        "user": st.text(max_size=200),
        "style": st.text(max_size=30),
        "partial_images": st.integers(0, 100),
    },
)
"""Requests that the service takes, with strange texts in them."""
POLICY = ("name", "categories", "trigger", "last_resort", "safe_prompt", "version")


@st.composite
def body(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Method, path and body: a request with strange fields, a policy with strange fields, or bytes that are no JSON.

    A fifth are sound requests, so that they are drawn.
    """
    if draw(st.integers(0, 4)) == 0:
        return "POST", "/v1/images/generations", json.dumps(draw(SOUND)).encode()
    policy = draw(st.integers(0, 4)) == 0
    known = POLICY if policy else FIELDS
    fields: dict[str, Any] = {} if policy or draw(st.integers(0, 9)) == 0 else {"prompt": draw(st.text(max_size=30))}
    for name in draw(st.lists(st.sampled_from(known), min_size=1, max_size=4)):
        fields[name] = draw(FEW.get(name, VALUES))
    if draw(st.integers(0, 3)) == 0:
        fields[draw(st.text(max_size=8))] = draw(VALUES)
    data = json.dumps(fields).encode()
    if draw(st.integers(0, 3)) == 0:
        where = draw(st.integers(0, len(data)))
        data = (
            data[:where]
            + draw(st.sampled_from((b"", b"NaN", b"\xff", b"[" * 2000, b"1e999", b'"', b"{}")))
            + data[where:]
        )
    if draw(st.integers(0, 19)) == 0:
        data = draw(st.binary(max_size=60))
    return ("PUT", "/v1/policy", data) if policy else ("POST", "/v1/images/generations", data)


def send_body(stand: Stand, sent: tuple[str, str, bytes]) -> httpx.Response:
    method, path, data = sent
    secret = OPERATOR if method == "PUT" else USER
    return stand.send(method, path, secret, content=data, headers={"content-type": "application/json"})


# One kind of input -------------------------------------------------------------------------------------------


class Watched:
    """Sends inputs to a service, counts the bad answers, and looks at its memory now and then."""

    def __init__(self, kind: str, stand: Stand, send: Callable[[Stand, Any], httpx.Response]) -> None:
        self.kind, self.stand, self.send = kind, stand, send
        self.count = self.errors = self.tracebacks = 0
        self.faults: list[str] = []
        self.samples: list[tuple[str, float, float]] = []
        self.codes: dict[int, int] = {}

    def __call__(self, value: Any) -> None:
        self.count += 1
        try:
            answer = self.send(self.stand, value)
            code, text = answer.status_code, answer.text
        except httpx.HTTPError as error:
            code, text = 599, f"{type(error).__name__}: {error}"
        except (ValueError, TypeError):  # the client itself cannot send this one
            return
        self.codes[code] = self.codes.get(code, 0) + 1
        self.errors += code >= 500
        self.tracebacks += "Traceback (most recent call last)" in text
        if code >= 500 and len(self.faults) < SHOWN:
            self.faults.append(f"{code} {text[:60]} for {value!r}"[:240])
        if self.count % EVERY == 0:
            self.samples += [(str(p), float(self.count), m) for p, m in self.stand.memory().items()]

    def row(self, seconds: float, printed: int) -> dict[str, Any]:
        """The row of this kind; tracebacks that the service printed count as much as those that it sent."""
        return {
            "kind": self.kind,
            "inputs": self.count,
            "answered": round(self.codes.get(200, 0) / max(self.count, 1), 4),
            "errors_5xx": self.errors,
            "tracebacks": self.tracebacks + printed,
            "memory_slope_mb_per_1000": slope(self.samples, 0.3) if self.count >= ENOUGH else None,
            "codes": json.dumps({str(k): v for k, v in sorted(self.codes.items())}),
            "faults": " | ".join(self.faults),
            "seconds": round(seconds, 1),
        }


def over_http(
    kind: str, inputs: st.SearchStrategy[Any], send: Callable[..., httpx.Response], count: int
) -> dict[str, Any]:
    """Fuzz a service of its own with one kind of input."""
    with served(DOUBLES) as stand:
        began = time.perf_counter()
        watched = Watched(kind, stand, send)
        each(inputs, count, watched)
        return watched.row(time.perf_counter() - began, stand.output().count("Traceback (most recent call last)"))


def of_files(count: int) -> list[dict[str, Any]]:
    """Rows of the fuzzing of files that are read from a disk, where that script is there.

    An error that is not the package's own would be a traceback for whoever reads the file; a hang counts like one. No
    service is asked, so these rows have no answers.
    """
    if find_spec("fuzz_files") is None:
        print("fuzz_files: not there, left out", flush=True)
        return []
    found: dict[str, dict[str, float]] = import_module("fuzz_files").run(count, SEED)
    rows = []
    for kind, m in found.items():
        growth = round(1000 * m["rss_growth_mb"] / m["inputs"], 4) if m["inputs"] >= ENOUGH else None
        rows.append({"kind": kind, "inputs": m["inputs"], "seconds": m["seconds"]})
        rows[-1] |= {"tracebacks": m["errors_other"] + m["hangs"], "memory_slope_mb_per_1000": growth}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each kind")
    parser.add_argument("--rows", type=Path, default=Path("runs/redteam/fuzz.jsonl"))
    args = parser.parse_args()
    end_in_order()
    for kind, inputs, send in (("uploads", damaged(), send_upload), ("JSON bodies", body(), send_body)):
        append_rows(args.rows, [row := over_http(kind, inputs, send, args.inputs)])
        print(row, flush=True)
    for row in of_files(args.inputs):
        append_rows(args.rows, [row])
        print(row, flush=True)


if __name__ == "__main__":
    main()
