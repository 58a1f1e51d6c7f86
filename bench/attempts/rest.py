"""Small things at the edge of the service: sizes of zero, foreign hosts, headers, paths in reports, SIGTERM."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import httpx

from attempts import Outcome
from attempts.processes import until
from attempts.stand import DOUBLE_SERVICE, DOUBLES, SLOW, released, served


def a_size_of_zero() -> Outcome:
    codes = {
        size: DOUBLE_SERVICE.get().draw(size=size).status_code for size in ("00x00", "0000x0000", "64x00", "00x64")
    }
    return Outcome("400 for each", str(codes), set(codes.values()) == {400})


def shaped(answer: httpx.Response) -> str:
    """What is wrong with an error body; empty if it has the fields that clients of the API rely on."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:60]!r}"
    missing = {"message", "type", "param", "code"} - set(error)
    return f"{answer.status_code} without {sorted(missing)}" if missing else ""


def error_bodies() -> Outcome:
    """Unknown paths, wrong methods, broken JSON, no body and wrong types all answer in the same shape."""
    stand, url = DOUBLE_SERVICE.get(), "/v1/images/generations"
    json = {"content-type": "application/json"}
    answers = [
        stand.get("/v1/nothing"),
        stand.get("/nothing"),
        stand.get(url),
        stand.send("DELETE", "/v1/policy"),
        stand.send("POST", url, content=b"{", headers=json),
        stand.send("POST", url, content=b"\xff\xfe", headers=json),
        stand.send("POST", url, content=b"[]", headers=json),
        stand.send("POST", url, json={"prompt": 7}),
        stand.send("POST", "/v1/audits", content=b"x", headers={"content-type": "multipart/form-data"}),
        stand.send(
            "POST", "/v1/audits", content=b"--x\r\n", headers={"content-type": "multipart/form-data; boundary=x"}
        ),
        stand.get("/v1/reports/nothing"),
        stand.get("/v1/images/nothing.png"),
    ]
    wrong = [s for s in map(shaped, answers) if s] + [f"{a.status_code}" for a in answers if a.status_code >= 500]
    return Outcome("an error object for each, no 5xx", "; ".join(wrong)[:160] or "an error object for each", not wrong)


def a_foreign_host_without_keys() -> Outcome:
    """DNS rebinding: a page from elsewhere makes the browser call a service that trusts this machine."""
    with served(DOUBLES, keyed=False) as stand:
        fields = {"prompt": "a person", "seed": 1}
        codes = {}
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            headers = {"Host": host}
            answer = stand.send("POST", "/v1/images/generations", None, json=fields, headers=headers)
            codes[host] = answer.status_code
        own = stand.draw(secret=None).status_code
    fits = all(400 <= code < 500 for code in codes.values()) and own == 200
    return Outcome("4xx for foreign hosts, 200 for loopback", f"{codes}, loopback {own}", fits)


def a_foreign_origin_without_keys() -> Outcome:
    """A form or fetch of a foreign page to http://127.0.0.1: the browser sends it along with its origin."""
    with served(DOUBLES, keyed=False) as stand:
        headers = {"Origin": "https://evil.example"}
        answer = stand.send("POST", "/v1/images/generations", None, json={"prompt": "a person"}, headers=headers)
        allowed = answer.headers.get("access-control-allow-origin", "")
        plain = stand.send("POST", "/v1/images/generations", None, content=b'{"prompt": "a person"}',
                           headers={**headers, "content-type": "text/plain"})  # fmt: skip
    got = f"readable for the page: {bool(allowed)}, as text/plain {plain.status_code}"
    return Outcome("not readable for the page, text/plain refused", got, not allowed and plain.status_code >= 400)


def security_headers() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    name = stand.report_id(stand.draw("please flag"))
    missing = []
    for path in ("/", "/health", "/v1/models", f"/v1/reports/{name}?html=true"):
        headers = stand.get(path).headers
        if headers.get("x-content-type-options") != "nosniff":
            missing.append(f"nosniff on {path[:12]}")
        if "text/html" in headers.get("content-type", "") and "content-security-policy" not in headers:
            missing.append(f"CSP on {path[:12]}")
    return Outcome("nosniff everywhere, CSP on pages", ", ".join(missing) or "all there", not missing)


def no_paths_in_owners_reports() -> Outcome:
    """The log breaks, its error names a file, and the owner reads the report."""
    with served(DOUBLES, logged=True) as stand:
        stand.log.rename(stand.log.with_name("moved"))
        answer = stand.draw()
        text = answer.text
        with suppress(KeyError, ValueError, IndexError):
            name = stand.report_id(answer)
            text += stand.get(f"/v1/reports/{name}").text + stand.get(f"/v1/reports/{name}?html=true").text
        found = [w for w in (str(stand.folder), stand.log.name, "site-packages", ".py") if w in text]
    named = ", ".join(found).replace(str(stand.folder), "its folder")
    got = f"{answer.status_code}, {f'names {named}' if found else 'no path'}"
    return Outcome("503 without a path", got, answer.status_code == 503 and not found)


def sigterm_under_load() -> Outcome:
    """SIGTERM with one batch running and others waiting: those that wait get 503 now, and the service ends."""
    with served(SLOW) as stand:
        answers: list[tuple[int, float, bool]] = []

        def ask(seed: int) -> None:
            began = time.monotonic()
            with suppress(httpx.HTTPError), httpx.Client(timeout=120) as client:
                fields = {"prompt": "a person", "n": 4, "seed": seed, "num_inference_steps": 20}
                headers = {"Authorization": "Bearer redteam-user-secret-1"}
                answer = client.post(f"{stand.address}/v1/images/generations", json=fields, headers=headers)
                answers.append((answer.status_code, time.monotonic() - began, released(answer)))

        threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        stand.process.terminate()
        gone = until(lambda: stand.process.poll() is not None, 60)
        for thread in threads:
            thread.join(5)
    turned = [spent for code, spent, _ in answers if code == 503]
    early = sum(spent < 8 for spent in turned)
    got = f"ended after {'over 60' if gone is None else round(gone)} s; codes {sorted(a[0] for a in answers)}"
    fits = gone is not None and gone < 35 and early >= 2 and len(answers) == 4
    return Outcome("waiting ones 503 at once, ends within 35 s", f"{got}, {early} at once", fits)


def strange_lengths() -> Outcome:
    """Content-Length that is no number or no length: refused, and the service goes on."""
    stand, wrong = DOUBLE_SERVICE.get(), {}
    for length in ("-1", "abc", "1e3", "9" * 20, "5, 6", ""):
        with socket.create_connection(("127.0.0.1", stand.port), timeout=20) as connection:
            head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
            connection.sendall(head.encode())
            with suppress(OSError):
                line = connection.recv(4096).split(b"\r\n")[0].decode(errors="replace")
                wrong |= {} if line.startswith("HTTP/1.1 4") or not line else {length: line}
    fits = not wrong and stand.healthy()
    return Outcome("4xx or a closed connection", str(wrong) if wrong else "none of them taken", fits)


ATTEMPTS = (
    a_size_of_zero,
    error_bodies,
    a_foreign_host_without_keys,
    a_foreign_origin_without_keys,
    security_headers,
    no_paths_in_owners_reports,
    sigterm_under_load,
    strange_lengths,
)
