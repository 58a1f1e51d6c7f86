"""Sources on the hub: gated ones without a token, private ones, and local paths that were taken for hub ids."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from guardpaint.data import sources
from guardpaint.data.sources import Source
from guardpaint.data.store import Corpus
from guardpaint.errors import BadInput

GATED, ABSENT = "GatedRepo", "RepoNotFound"


@pytest.fixture
def refusing():
    """A hub on this machine that refuses everything; returns its address and how to say why."""
    reason = {"code": GATED, "status": 401}

    class Handler(BaseHTTPRequestHandler):
        def refuse(self):
            self.send_response(reason["status"])
            self.send_header("X-Error-Code", reason["code"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET = do_POST = refuse

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", reason
    server.shutdown()


def ingest(address, tmp_path, **environment):
    """The command in a process of its own, because the hub's address is read when its library is imported."""
    manifest = tmp_path / "m.yaml"
    manifest.write_text("sources: [{name: nsfw-full, path: someone/nsfw-full, category: nudity}]")
    places = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "COLUMNS": "400"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    command = [sys.executable, "-m", "guardpaint.cli", "data", "ingest", str(manifest), "--out", str(tmp_path / "c")]
    done = subprocess.run(command, env={**kept, **places, **environment}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_a_gated_source_without_a_token(refusing, tmp_path):
    code, said = ingest(refusing[0], tmp_path)
    assert code == 1 and "Traceback" not in said, said
    assert "source nsfw-full (someone/nsfw-full): gated" in said
    assert "https://huggingface.co/datasets/someone/nsfw-full" in said and "HF_TOKEN" in said


def test_a_token_without_access_is_not_shown(refusing, tmp_path):
    refusing[1].update(status=403)
    code, said = ingest(refusing[0], tmp_path, HF_TOKEN="hf_secret")
    assert code == 1 and "has no access: accept its terms at https://huggingface.co/datasets/someone/nsfw-full" in said
    assert "hf_secret" not in said


def test_a_source_that_is_not_there(refusing, tmp_path):
    refusing[1].update(status=404, code=ABSENT)
    code, said = ingest(refusing[0], tmp_path)
    assert code == 1 and "not on the hub, or private" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "gated: accept its terms at https://huggingface.co/datasets/someone/nsfw-full"),
        (RepositoryNotFoundError, "not on the hub, or private"),
    ],
)
def test_the_hubs_own_errors_while_rows_are_read(error, message, monkeypatch):
    """Some repositories show their card and refuse their files."""
    import datasets

    response = httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/x"))

    def refuse(*args, **kwargs):
        try:
            raise error("401", response=response)
        except error as cause:
            raise FileNotFoundError("cannot open the file") from cause

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(BadInput, match=message):
        next(sources.stream(Source("s", "someone/nsfw-full")))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data/pictures", r"data/pictures is a local file or folder, but format is hub; .*`format:` parquet, jsonl"),
        ("data/pictuers", "data/pictuers does not exist, but the folder data does; .* hub:data/pictuers"),
        ("downloads/train.parquet", "is no local path, and no hub id, which is written OWNER/NAME"),
        ("/data/pictures", "is no local path, and no hub id"),
        ("./pictures", "is no local path, and no hub id"),
        ("a/b/c", "is no local path, and no hub id"),
        ("pictures", "is no local path, and no hub id"),
        ("hub:a/b/c", "no hub id; write hub:OWNER/NAME"),
    ],
)
def test_a_local_path_is_never_sent_to_the_hub(path, message, tmp_path, monkeypatch):
    import datasets

    (tmp_path / "data" / "pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the hub was asked"))
    with pytest.raises(BadInput, match=f"source s: .*{message}"):
        sources.ingest([Source("s", path)], Corpus(tmp_path / "c"), quiet=True)


def test_a_bad_source_is_named_before_anything_is_read(tmp_path):
    good = Source("good", "train", format="world")
    with pytest.raises(BadInput, match=r"source bad: nowhere\.csv does not exist"):
        sources.ingest(
            [good, Source("bad", "nowhere.csv", format="csv")],
            Corpus(tmp_path),
            quiet=True,
            open_dataset=lambda name: pytest.fail("a source was read"),
        )


def test_a_hub_id_may_look_like_a_folder_if_it_says_so(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(path, *args, **kwargs):
        asked.append((path, kwargs["token"]))
        raise OSError("offline")

    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(BadInput, match="not to be had from the hub"):
        next(sources.stream(Source("s", "hub:data/pictures"), token="t"))
    assert asked == [("data/pictures", "t")]
