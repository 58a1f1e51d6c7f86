"""Strange files: manifests, policies, settings, whole guard folders, audit logs and anchors, made by hypothesis.

python bench/fuzz_files.py --n 10000

Whatever a file holds, reading it ends in a value or in one of the package's own errors, soon, and keeps no memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from guardpaint.config import GuardConfig
from guardpaint.errors import GuardPaintError
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, begin_chain, sign_anchor
from guardpaint.loop.log_chain import line_of, read_entries, verify_log
from guardpaint.loop.log_repair import repair_log
from guardpaint.loop.log_replay import replay
from guardpaint.parts.folder import read_settings
from guardpaint.parts.kinds import load_part
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import write_json
from guardpaint.store.heap import give_back
from guardpaint.testing import small
from guardpaint.verify.weak import weak_settings

KEY = b"a secret of the fuzzing"
SLOWEST = 5.0
"""Seconds after which an input counts as one that hangs."""

# Values ------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([0.5, 1.0, -0.0, 1e308, 10**400, -(10**20), 2**63]),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "../../etc", "/etc/passwd", "\x00", "\ud800", "x" * 300, "safe", "nudity", "off", "keep", "nan"]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)


JUNK = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"", b"\x00", b"\xff\xfe", b"\n", b"}", b"[" * 3000, b"\xed\xa0\x80"])
)


@dataclass(frozen=True)
class Spice:
    """What hypothesis draws: strange values, from which a batch of inputs is mixed."""

    values: list[Any]
    texts: list[str]
    junk: list[bytes]
    random: Random

    def value(self) -> Any:
        return self.random.choice(self.values)

    def mutated(self, sound: Any) -> Any:
        """A sound value with up to three places replaced, left out or given a stranger beside them."""
        value = sound
        for _ in range(self.random.randint(1, 3)):
            value = changed(value, self.random.choice(paths(value)), self.value(), self.random.random() < 0.3)
        if isinstance(value, dict) and self.random.random() < 0.3:
            value = {**value, self.random.choice(self.texts): self.value()}
        return value

    def spoilt(self, data: bytes) -> bytes:
        """The bytes of a sound file cut, or with a piece replaced by junk, or only junk."""
        start, end = sorted(self.random.randint(0, len(data)) for _ in range(2))
        junk = self.random.choice(self.junk)
        return self.random.choice(
            [data[:start] + junk + data[end:], data[:start] + junk + data[start:], data[:end], junk]
        )


SPICE = st.builds(
    Spice,
    st.lists(VALUES, min_size=4, max_size=10),
    st.lists(TEXTS, min_size=2, max_size=5),
    st.lists(JUNK, min_size=2, max_size=5),
    st.integers(0, 2**64).map(Random),
)
BATCH = 25
"""Inputs mixed from one spice: drawing costs more than reading."""


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places in a JSON value, the whole included."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for k, v in children for p in paths(v, (*at, k)))]


def changed(value: Any, at: tuple[Any, ...], new: Any, drop: bool) -> Any:
    """The value with another one in one place, or without that place."""
    if not at:
        return new
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(at) == 1 and drop:
        del copy[at[0]]
    else:
        copy[at[0]] = changed(value[at[0]], at[1:], new, drop)
    return copy


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def as_yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=False).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return as_json(value)


YAML_TRAPS = [
    b"a: &a [x, x]\nb: &b [*a, *a]\nname: *b\n",
    b"&a [*a]",
    b"<<: &a {x: 1}",
    b"name: !!python/object/apply:os.system [true]\n",
    b"name: 2001-99-99\n",
    b"trigger: 0x" + b"f" * 5000,
    b"trigger: " + b"9" * 5000,
    b"trigger: 1:2:3\n",
    b"? [a]\n: b\n",
    b"[" * 5000,
    b"- " * 3000,
    b"{" * 3000,
    b"name: 'a\n",
    b"---\na: 1\n---\nb: 2\n",
    b"a: 1\n1: 2\nnull: 3\n",
]

# Targets -----------------------------------------------------------------------------------------------------

SETTINGS = {"config": GuardConfig().to_dict(), "decoders": ["sd"], "repairer": "inpainter", "proposer": "fixed"}
SETTINGS |= {"version": 1, "ranker": False}
SETTINGS["config"]["calibration"] = {
    "alpha": 0.05, "beta": 0.1, "data": "0" * 64, "auditor": "",
    "bands": [{"start": 0.0, "thresholds": {"nudity": 0.5}, "mask_level": None, "n": {"nudity": 100}}],
}  # fmt: skip
SETTINGS["knobs"] = {"cfg": 4.0, "dilation": 0.7, "feather": 0.2, "jitter": 0.0, "depth": 3, "seed_offset": 0}


def read_manifest(folder: Path, data: bytes) -> None:
    (folder / "guardpaint.json").write_bytes(data)
    manifest, policy, config = read_settings(folder, DEFAULT if len(data) % 20 else None)
    weak_settings(policy, config)
    if manifest.parts["proposer"].source is None:
        load_part("proposer", manifest.parts["proposer"], folder)


DEFAULT = Policy.default()
POLICY = as_yaml(DEFAULT.to_dict())


def read_policy(folder: Path, data: bytes) -> None:
    (folder / "other.yaml").write_bytes(data)
    policy = Policy.load(folder / "other.yaml")
    assert Policy.from_dict(policy.to_dict()).digest() == policy.digest()
    weak_settings(policy, GuardConfig())


def read_config(folder: Path, data: Any) -> None:
    config = GuardConfig.from_dict(data)
    assert GuardConfig.from_dict(config.to_dict()) == config
    weak_settings(DEFAULT, config)


def log_bytes(key: bytes | None = KEY) -> bytes:
    """A log of four records."""
    with tempfile.TemporaryDirectory() as folder, AuditLog(Path(folder) / "log", key=key) as log:
        log.append([{"n": 0, "steps": []}, {"n": 1, "steps": []}])
        log.append([{"rotated_from": {"file": "older.jsonl", "seq": 0, "head": "0" * 64}}], kind="event")
        log.append([{"n": 3, "steps": [{"step": 0, "tournaments": []}]}])
        return (Path(folder) / "log").read_bytes()


LOG = log_bytes()


def rehashed(spice: Spice) -> bytes:
    """A log by somebody who knows the key, or who needs none: records with right hashes and any content."""
    key = spice.random.choice([KEY, None])
    head, lines = "0" * 64, []
    for seq in range(spice.random.randint(1, 3)):
        sound = {"seq": seq, "prev": head, "event": {"rotated_from": {"file": "a", "seq": 0, "head": "0"}}}
        entry = spice.mutated(sound)
        try:
            line, head = line_of(entry, key)
        except (ValueError, TypeError):
            line = as_json(entry)
        lines.append(line)
    return b"\n".join(lines) + spice.random.choice([b"\n", b"", b"\n{"])


def read_log(folder: Path, data: bytes) -> None:
    """Every reader of a log; those that change it work on a copy."""
    log, anchor = folder / "audit.jsonl", folder / "head.json"
    anchor.unlink(missing_ok=True)
    log.write_bytes(data)
    for key in (KEY, None):
        state = verify_log(log, key=key)
        opened = outcome(lambda key=key: AuditLog(log, key=key).close())
        assert state.ok == (opened is None), (state.problems, opened)
    for _, entry, problem in read_entries(log):
        if not problem and isinstance(entry.get("report"), dict):
            outcome(lambda entry=entry: replay(entry["report"]))
    if outcome(lambda: repair_log(log, key=KEY, anchor=None)) is None:
        assert verify_log(log, key=KEY).ok
    else:
        assert log.read_bytes() == data, "a repair that is refused changes nothing"


def outcome(work: Callable[[], Any]) -> GuardPaintError | None:
    """The package's own error, if the work ends in one."""
    try:
        work()
    except GuardPaintError as error:
        return error
    return None


ANCHOR = {"seq": 4, "head": "0" * 64, "mac": "0" * 64}


def read_anchored(folder: Path, data: bytes) -> None:
    """A sound log beside any anchor: whatever accepts the pair has seen a right signature."""
    log, anchor = folder / "audit.jsonl", folder / "head.json"
    log.write_bytes(LOG)
    anchor.write_bytes(data)
    state = verify_log(log, key=KEY, anchor=anchor)
    opened = outcome(lambda: AuditLog(log, key=KEY, anchor=anchor).close())
    assert state.ok == (opened is None), (state.problems, opened)
    outcome(lambda: sign_anchor(log, key=KEY, anchor=anchor))
    log.write_bytes(LOG + b"{")
    outcome(lambda: repair_log(log, key=KEY, anchor=anchor))
    log.unlink()
    outcome(lambda: begin_chain(log, key=KEY, anchor=anchor, reason="fuzzing"))


def folder_file(spice: Spice, sound: dict[str, bytes]) -> tuple[str, bytes]:
    """One file of a guard folder, changed."""
    name = spice.random.choice(sorted(sound))
    if name.endswith(".json") and spice.random.random() < 0.6:
        return name, as_json(spice.mutated(json.loads(sound[name])))
    return name, spice.spoilt(sound[name])


def guard_folder() -> tuple[Path, dict[str, bytes]]:
    """A small guard on disk, and those of its files that are mutated."""
    folder = Path(tempfile.mkdtemp(prefix="guard-"))
    small.guard().save_pretrained(folder)
    names = [p for pattern in ("*.json", "*.yaml", "auditor/*", "proposer/*") for p in folder.glob(pattern)]
    return folder, {str(p.relative_to(folder)): p.read_bytes() for p in names if p.is_file()}


Target = tuple[Callable[[Spice], Any], Callable[[Path, Any], None]]


def targets() -> dict[str, Target]:
    """What is fuzzed: how an input is mixed from a spice, and the function that reads it."""
    policy, manifest, anchor = DEFAULT.to_dict(), as_json(SETTINGS), as_json(ANCHOR)

    def either(spice: Spice, *ways: Callable[[], Any]) -> Any:
        return spice.random.choice(ways)()

    return {
        "manifests": (
            lambda s: either(s, lambda: as_json(s.mutated(SETTINGS)), lambda: s.spoilt(manifest)),
            read_manifest,
        ),
        "policies": (
            lambda s: either(
                s,
                lambda: as_yaml(s.mutated(policy)),
                lambda: as_json(s.mutated(policy)),
                lambda: s.spoilt(POLICY),
                lambda: s.random.choice(YAML_TRAPS) if s.random.random() < 0.1 else as_json(s.value()),
            ),
            read_policy,
        ),
        "configs": (lambda s: either(s, lambda: s.mutated(SETTINGS["config"]), s.value), read_config),
        "logs": (lambda s: either(s, lambda: s.spoilt(LOG), lambda: s.spoilt(LOG[:-1]), lambda: rehashed(s)), read_log),
        "anchors": (lambda s: either(s, lambda: as_json(s.mutated(ANCHOR)), lambda: s.spoilt(anchor)), read_anchored),
    }


FOLDER_SHARE = 50
"""One input in so many for whole folders, because every one loads weights."""


def run(n: int, seed: int) -> dict[str, dict[str, int | float]]:
    """Read `n` files of every kind; returns how many ended in an error that is not the package's own, and the costs."""
    results = {}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk would be slower
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as place:
        (Path(place) / "policy.yaml").write_bytes(POLICY)
        for name, (mix, read) in targets().items():
            results[name] = measured(mix, read, Path(place), n, seed)
    folder, sound = guard_folder()
    try:

        def load(_: Path, change: tuple[str, bytes]) -> None:
            name, data = change
            (folder / name).write_bytes(data)
            try:
                GuardPaint.from_pretrained(folder)
            finally:
                (folder / name).write_bytes(sound[name])

        results["guard_folders"] = measured(
            lambda s: folder_file(s, sound), load, folder, max(1, n // FOLDER_SHARE), seed
        )
    finally:
        shutil.rmtree(folder)
    return results


def measured(
    mix: Callable[[Spice], Any], read: Callable[[Path, Any], None], place: Path, n: int, number: int
) -> dict[str, int | float]:
    """Run one target over `n` inputs."""
    other: list[str] = []
    times: list[float] = []
    before = 0.0

    def one(value: Any) -> None:
        nonlocal before
        if len(times) == n // 5:
            before = rss_mb()
        start = time.perf_counter()
        try:
            read(place, value)
        except GuardPaintError as error:
            str(error)
        except Exception as error:
            other.append(f"{type(error).__name__}: {str(error)[:200]} ← {str(value)[:300]!r}")
        times.append(time.perf_counter() - start)

    def draw(use: Callable[[Any], None]) -> None:
        left = n

        @seed(number)
        @settings(
            max_examples=-(-n // BATCH),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(SPICE)
        def batch(spice: Spice) -> None:
            nonlocal left
            for _ in range(min(BATCH, left)):
                use(mix(spice))
            left -= min(BATCH, left)

        batch()

    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tempfile.TemporaryFile() as inputs:  # hypothesis remembers what it drew: no growth of the readers
            draw(lambda value: pickle.dump(value, inputs))
            gc.collect()
            inputs.seek(0)
            for _ in range(n):
                one(pickle.load(inputs))
    for line in other[:5]:
        print(line)
    return {
        "inputs": len(times),
        "errors_other": len(other),
        "hangs": sum(t > SLOWEST for t in times),
        "slowest_s": round(max(times), 3),
        "seconds": round(time.perf_counter() - start, 2),
        "rss_growth_mb": round(rss_mb() - before, 1),
    }


def rss_mb() -> float:
    """Resident memory of this process, without what the heap keeps for later: holes come and go with the order of
    allocations, and are no growth of the readers."""
    gc.collect()
    give_back()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=int(os.environ.get("FUZZ_INPUTS", "10000")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the result to this JSON file")
    options = parser.parse_args()
    found = run(options.n, options.seed)
    print(json.dumps(found, indent=2))
    if options.out is not None:
        write_json(options.out, found)
    raise SystemExit(any(t["errors_other"] or t["hangs"] for t in found.values()))


if __name__ == "__main__":
    main()
