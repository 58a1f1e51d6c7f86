"""Guards and models that look right and are not: switched off, never calibrated, missing, or a pickle."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from attempts import Outcome
from attempts.stand import DOLLS, Refused, command, scratch, served


@contextmanager
def guard_copy() -> Iterator[Path]:
    """A copy of the embedded guard that an attempt may change."""
    from paperdolls.bases import guard_folder

    with scratch() as folder:
        yield Path(shutil.copytree(guard_folder(), folder / "guard"))


def configured(guard: Path, **changes: Any) -> None:
    path = guard / "guardpaint.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "config": {**manifest["config"], **changes}}))


def governed(guard: Path, **changes: Any) -> None:
    path = guard / "policy.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}, sort_keys=False))


def refuses(guard: Path, word: str) -> Outcome:
    """Serve the guard: the service must not start and must say why."""
    expected = f"does not start, says {word!r}"
    try:
        with served(DOLLS, more=("--guard", str(guard))):
            return Outcome(expected, "started", False)
    except Refused as error:
        text = error.output.replace(str(guard.parent), "").strip()
        fits = error.code == 1 and "Traceback" not in text and word in text
        return Outcome(expected, f"exit {error.code}: {text[-160:]}", fits)


def a_guard_that_is_switched_off() -> Outcome:
    with guard_copy() as guard:
        configured(guard, mode="off")
        return refuses(guard, "off")


def a_guard_that_only_monitors() -> Outcome:
    with guard_copy() as guard:
        configured(guard, mode="monitor")
        return refuses(guard, "monitor")


def a_policy_that_keeps_what_is_flagged() -> Outcome:
    with guard_copy() as guard:
        governed(guard, last_resort=["keep"])
        return refuses(guard, "keep")


def a_trigger_that_never_triggers() -> Outcome:
    with guard_copy() as guard:
        governed(guard, trigger=1.0)
        return refuses(guard, "trigger")


def a_guard_without_calibration() -> Outcome:
    with guard_copy() as guard:
        configured(guard, calibration=None, mask_threshold="percentile")
        return refuses(guard, "calibrat")


def the_library_says_it_loudly() -> Outcome:
    """The same guards in a command: loaded, but not in silence."""
    quiet = []
    with scratch() as folder:
        from guardpaint.testbed import KnownPictures, need
        from paperdolls.testbed import PaperDolls

        picture = folder / "picture.png"
        need(PaperDolls(), KnownPictures, "the attempt").known_bad().save(picture)
        for name, config, policy in (
            ("mode off", {"mode": "off"}, {}),
            ("keep", {}, {"last_resort": ["keep"]}),
            ("trigger 1.0", {}, {"trigger": 1.0}),
            ("no calibration", {"calibration": None, "mask_threshold": "percentile"}, {}),
        ):
            with guard_copy() as guard:
                configured(guard, **config)
                governed(guard, **policy)
                found = command("audit", str(picture), "--guard", str(guard), folder=folder)
            word = name.split()[-1 if name == "no calibration" else 0]
            quiet += [] if word in found.stderr else [name]
    return Outcome("a warning for each", f"silent: {', '.join(quiet)}" if quiet else "a warning for each", not quiet)


# Missing paths -----------------------------------------------------------------------------------------------


@contextmanager
def hub() -> Iterator[tuple[str, list[bytes]]]:
    """A false hub on loopback that remembers what it was asked for."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        over = threading.Event()

        def answer() -> None:
            while not over.is_set():
                with suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(2)
                        asked.append(connection.recv(4096).split(b"\r\n")[0])
                        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        over.set()
        thread.join(5)


def a_missing_path_is_never_downloaded() -> Outcome:
    """Paths that do not exist, as guard and as base: an error that names the path, and no question to a hub."""
    wrong = []
    with scratch() as folder, hub() as (address, asked):
        picture = folder / "picture.png"
        shutil.copy(Path(__file__).parents[2] / "docs/images/page-draw.png", picture)
        env = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        for path in ("./missing/guard", str(folder / "gone"), "../missing/guard", "guards/", "missing"):
            found = command("audit", str(picture), "--guard", path, folder=folder, **env)
            if found.returncode != 1 or "Traceback" in found.stderr or asked:
                wrong.append(f"{path} (exit {found.returncode}, asked {len(asked)} times)".replace(str(folder), ""))
            asked.clear()
    return Outcome("an error, no question to a hub", "; ".join(wrong) or "an error for each", not wrong)


PICKLES = {
    "unet": "diffusion_pytorch_model.bin",
    "vae": "diffusion_pytorch_model.bin",
    "text_encoder": "pytorch_model.bin",
}
"""File names under which diffusers and transformers look for pickled weights."""


class Payload:
    """What a pickle may do when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def pickled_weights_are_refused() -> Outcome:
    """A base and a guard whose weights are .bin pickles: refused, and the pickle is not run."""
    from guardpaint.testing import small

    with scratch() as folder:
        marker, base = folder / "ran", folder / "base"
        small.pipeline("sd").save_pretrained(base)
        for part in PICKLES:
            for file in (base / part).glob("*.safetensors"):
                file.with_name(PICKLES[part]).write_bytes(pickle.dumps(Payload(marker)))
                file.unlink()
        from paperdolls.bases import guard_folder

        expected = "does not start, names safetensors, the pickle did not run"
        try:
            with served(str(base), more=("--guard", str(guard_folder()))):
                return Outcome(expected, "started", False)
        except Refused as error:
            named = "safetensors" in error.output
            got = f"exit {error.code}, ran: {marker.exists()}, names safetensors: {named}"
            return Outcome(expected, got, error.code == 1 and named and not marker.exists())


ATTEMPTS = (
    a_guard_that_is_switched_off,
    a_guard_that_only_monitors,
    a_policy_that_keeps_what_is_flagged,
    a_trigger_that_never_triggers,
    a_guard_without_calibration,
    the_library_says_it_loudly,
    a_missing_path_is_never_downloaded,
    pickled_weights_are_refused,
)
