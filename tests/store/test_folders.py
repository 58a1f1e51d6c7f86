"""Names of models: a folder, or the hub if that was asked for; safetensors only; no pickle is ever read."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest
import torch

import guardpaint
from guardpaint.bases import load_base, load_inpainter
from guardpaint.data.labelers import Asking, open_labeler
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadCheckpoint, BadInput, GuardPaintError
from guardpaint.evaluate.real_metrics import VisionFeatures, open_metric
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.store.folders import base_name, resolve
from guardpaint.testbed.models import load_surrogate
from guardpaint.testing import small

SOURCE = Path(guardpaint.__file__).parent
SOURCES = [SOURCE, SOURCE.parents[1] / "packages" / "paperdolls" / "src", SOURCE.parents[1] / "bench"]
FILES = [p for root in SOURCES for p in sorted(root.rglob("*.py"))]


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach the network fails the test."""

    def reach(self, address):
        raise AssertionError(f"the network was reached: {address}")

    monkeypatch.setattr(socket.socket, "connect", reach)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: reach(None, a))


NAMES = (
    "owner/name",
    "guards/mine",
    "/nowhere/at/all",
    "./nothing",
    "~/nothing",
    "a/b/c",
    "guard.yaml",
    "not-a-hub-id",
    "",
    "https://example.com/x",
    "file:///etc",
    "a\x00b",
    "x" * 5000,
)
OPENERS = {
    "guard": GuardPaint.from_pretrained,
    "base": load_base,
    "inpainter": load_inpainter,
    "repairer": Inpainter.from_pretrained,
    "pipeline_repairer": PipelineRepairer.from_pretrained,
    "pipeline": load_pipeline,
    "clip": lambda name: open_metric(f"clip:{name}"),
    "blip": lambda name: open_metric(f"blip:{name}"),
    "features": VisionFeatures.from_pretrained,
    "surrogate": load_surrogate,
    "vlm": lambda name: open_labeler(f"vlm:{name}", Asking(Policy.default())),
    "shieldgemma": lambda name: open_labeler(f"shieldgemma:{name}", Asking(Policy.default())),
    "detector": lambda name: open_labeler(f"detector:{name}", Asking(Policy.default())),
}


@pytest.mark.parametrize("kind", OPENERS)
def test_a_name_that_is_no_folder_never_becomes_a_download(kind, offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guard.yaml").write_text("x")
    for name in NAMES:
        with pytest.raises(GuardPaintError) as caught:
            OPENERS[kind](name)
        assert name[:40] in str(caught.value).replace("\\x00", "\x00")


def test_the_error_says_which_part_of_a_path_is_missing(tmp_path):
    with pytest.raises(BadCheckpoint, match=f"{tmp_path}/typo does not exist"):
        resolve(tmp_path / "typo" / "guard")
    with pytest.raises(BadCheckpoint, match="owner does not exist.*hub:owner/name"):
        resolve("owner/name")


def test_the_hub_is_asked_for_by_name(tmp_path):
    calls = []

    def download(repo, revision):
        calls.append((repo, revision))
        return tmp_path

    assert resolve("hub:owner/name", download) == tmp_path
    assert resolve("hub:owner/na.me-1@refs/pr/3", download) == tmp_path
    assert calls == [("owner/name", None), ("owner/na.me-1", "refs/pr/3")]
    for bad in ("hub:", "hub:name", "hub:a/b/c", "hub:/etc/passwd", "hub:../x", "hub:a/..", "hub:a/b@", "hub:a b/c"):
        with pytest.raises(BadCheckpoint, match="write hub:owner/name"):
            resolve(bad, download)
    assert len(calls) == 2


@pytest.fixture
def pickled(tmp_path):
    """A pipeline whose weights are pickles, which would run code when they are read."""

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "pipe"
    small.inpainter().pipe.save_pretrained(folder)
    for part in ("unet", "vae", "text_encoder"):
        for weights in (folder / part).glob("*.safetensors"):
            weights.unlink()
            name = "pytorch_model.bin" if part == "text_encoder" else "diffusion_pytorch_model.bin"
            torch.save({"a": Bomb()}, folder / part / name)
    return folder


@pytest.mark.parametrize(
    "opener", [load_base, load_inpainter, Inpainter.from_pretrained, PipelineRepairer.from_pretrained, load_pipeline]
)
def test_pickles_are_refused_and_the_error_says_how_to_convert(opener, pickled):
    with pytest.raises((BadCheckpoint, BadInput), match=r"\.bin and no safetensors.*save_pretrained"):
        opener(str(pickled))
    assert not (pickled.parent / "ran").exists()


@pytest.mark.parametrize("part", ["decoders/sd", "repairer/tiny_decoder"])
def test_pickled_decoders_of_a_guard_are_refused(tmp_path, part):
    small.guard().save_pretrained(tmp_path)
    folder = tmp_path / part
    if not folder.is_dir():
        small.tiny_decoder(4).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        torch.save({}, weights.with_suffix(".bin"))
        weights.unlink()
    with pytest.raises(BadCheckpoint, match="no safetensors"):
        GuardPaint.from_pretrained(tmp_path)


# The source --------------------------------------------------------------------------------------------------

PICKLES = {
    "data/judges/clip_heads.py": "an unpickler that knows arrays and refuses everything else, for heads that are published so",
    "testing/small_judges.py": "writes a small head in the published form, to see that it is read",
    "serve/service.py": "its own reports, packed while it keeps them in memory",
    "store/jobs.py": "rows of the package's own objects, on their way over a Ray cluster",
    "serve/child.py": "messages between the service and its own child, over a pipe that nobody else can open",
    "serve/process.py": "the service's end of that pipe",
    "fuzz_files.py": "files of the fuzzing bench, which writes pickles to see them refused",
    "loading.py": "an attempt of the red-team bench, which writes one to see it refused",
}
NO_WEIGHTS = (
    "Tokenizer",
    "Processor",
    "FeatureExtractor",
    "Scheduler",
    "processor_class",
    "Config",
    "pictures_only(known)",
)
OWN = {"GuardPaint", "AuditorScorer", "Inpainter", "Ranker", "TournamentProposer", "Oracle", "Segmenter"} | {
    "OnnxAuditor",
    "ClassifierAuditor",
    "ZeroShotAuditor",
    "PipelineRepairer",
    "ImageEncoder",
    "StockChecker",
}
"""Classes of ours whose from_pretrained reads safetensors itself."""


def test_the_source_reads_no_pickles():
    for path in FILES:
        name = str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else path.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {a.name for a in node.names} | {getattr(node, "module", None)}
                wrong = modules & {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
                assert not wrong or name in PICKLES, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                check_call(node, f"{path}:{node.lineno}")


def check_call(node, where):
    called = ast.unparse(node.func)
    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if called == "torch.load":
        assert given.get("weights_only") == "True", f"{where}: torch.load without weights_only=True"
    assert given.get("allow_pickle") in (None, "False"), where
    assert given.get("trust_remote_code") in (None, "False"), where
    if called.startswith("yaml."):
        assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), where
    if called.endswith((".from_pretrained", ".load_lora_weights", ".from_single_file")):
        owner = called.rpartition(".")[0]
        if owner.endswith(("super()", "cls", *OWN)) or owner in OURS_BY_VARIABLE:
            return
        assert given.get("local_files_only") == "True", f"{where}: {called} may download"
        if not owner.endswith(NO_WEIGHTS):
            assert given.get("use_safetensors") == "True", f"{where}: {called} may read a pickle"


OURS_BY_VARIABLE = {
    "KINDS[kind]",
    "VisionFeatures",
    "ChatLabeler",
    "ShieldLabeler",
    "DetectorLabeler",
    "VlmApprover",
} | {
    "part_class(role, name)",
    "known",
}


def test_a_base_may_be_named_by_its_hub_id_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert base_name("stabilityai/a-model") == "hub:stabilityai/a-model"
    (tmp_path / "stabilityai").mkdir()
    assert base_name("stabilityai/a-model") == "stabilityai/a-model"
    for name in ("/etc/model", "./a/b", "a/b/c", "model", "hub:a/b", "~/model"):
        assert base_name(name) == name
