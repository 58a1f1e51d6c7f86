"""Revision and token of the hub reach everything that a guard downloads, and are never written anywhere."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from guardpaint.bases import load_guard
from guardpaint.cli.main import app
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.parts import presets
from guardpaint.parts.kinds import load_part
from guardpaint.policy import Policy
from guardpaint.repair.options import Adapter
from guardpaint.store.folders import Access
from guardpaint.store.manifest import PartEntry
from guardpaint.testing import small, small_detectors, small_inpainters

TOKEN = "hf_secret"


class Hub:
    """Folders by repository; keeps what was asked for, and refuses whoever brings no token."""

    def __init__(self):
        self.folders, self.asked = {}, []

    def snapshot_download(self, repo, revision=None, token=None, **more):
        self.asked.append((repo, revision, token))
        return str(self.folders[repo])

    def hf_hub_download(self, repo, file, revision=None, token=None):
        return str(Path(self.snapshot_download(repo, revision, token)) / file)


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    for user in ("diffusers.pipelines.pipeline_utils", "transformers.utils.hub", "peft.utils.save_and_load"):
        importlib.import_module(user)  # these keep the functions that they find when they are first imported
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.hf_hub_download)
    return found


@pytest.fixture
def guard_folder(hub, tmp_path):
    small.guard().save_pretrained(tmp_path / "guard")
    hub.folders["o/guard"] = tmp_path / "guard"
    return tmp_path / "guard"


def test_a_guard_is_asked_for_with_its_revision_and_token(hub, guard_folder):
    GuardPaint.from_pretrained("hub:o/guard", revision="v1", token=TOKEN)
    load_guard("hub:o/guard@v2", None, print, access=Access(token=TOKEN))
    load_guard("hub:o/guard", None, print, access=Access("v3"))
    assert hub.asked == [("o/guard", "v1", TOKEN), ("o/guard", "v2", TOKEN), ("o/guard", "v3", None)]


def test_parts_that_a_manifest_names_on_the_hub_get_the_token_and_no_revision(hub, guard_folder):
    hub.folders["o/auditor"] = guard_folder / "auditor"
    values = json.loads((guard_folder / "guardpaint.json").read_text())
    values["parts"]["auditor"]["source"] = "hub:o/auditor@abc"
    (guard_folder / "guardpaint.json").write_text(json.dumps(values))
    GuardPaint.from_pretrained("hub:o/guard", revision="v1", token=TOKEN)
    assert hub.asked == [("o/guard", "v1", TOKEN), ("o/auditor", "abc", TOKEN)]
    values["parts"]["auditor"]["options"] = {"token": TOKEN}
    (guard_folder / "guardpaint.json").write_text(json.dumps(values))
    with pytest.raises(BadCheckpoint, match="no option token"):
        GuardPaint.from_pretrained("hub:o/guard")


@pytest.mark.parametrize("name", ["preset:zero-shot", "preset:dolls", None, "tiny"])
def test_what_has_no_revisions_refuses_one(name):
    with pytest.raises(BadConfig, match="leave out.*revision='v1'"):
        load_guard(name, None, print, access=Access("v1"))
    with pytest.raises(BadConfig, match="leave out.*revision='v1'"):
        GuardPaint.from_pretrained(name if name and name.startswith("preset") else "preset:paper", revision="v1")


def test_a_folder_has_no_revision_either(guard_folder):
    with pytest.raises(BadCheckpoint, match="has no revisions"):
        load_guard(str(guard_folder), None, print, access=Access("v1"))


def test_every_model_of_a_preset_is_asked_for_with_the_token_that_is_not_saved(hub, tmp_path):
    pairs = {
        presets.SIGLIP: small_detectors.siglip(),
        presets.CLIPSEG: small_detectors.clipseg(),
        presets.FALCONSAI: small_detectors.classifier("vit", ("normal", "nsfw")),
    }
    hub.folders = {m.repo: small_detectors.saved(pair, tmp_path / m.repo) for m, pair in pairs.items()}
    guard = GuardPaint.from_preset("zero-shot", token=TOKEN, decoders={})
    assert {repo for repo, *_ in hub.asked} == set(hub.folders) and {token for *_, token in hub.asked} == {TOKEN}
    guard.save_pretrained(tmp_path / "saved")
    assert not [p for p in (tmp_path / "saved").rglob("*.json") if TOKEN in p.read_text()]


@pytest.mark.parametrize("kind", ["inpainter", "pipeline"])
def test_an_adapter_of_a_repairer_is_asked_for_with_the_token(hub, tmp_path, kind):
    pipe = small_inpainters.inpainting("sd")
    pipe.save_pretrained(tmp_path / "pipe")
    hub.folders = {"o/pipe": tmp_path / "pipe", "o/lora": small_inpainters.random_lora(pipe, tmp_path / "lora")}
    adapter = vars(Adapter("hub:o/lora", "LCMScheduler"))
    part = load_part("repairer", PartEntry(kind, "hub:o/pipe", {"adapter": adapter}), None, TOKEN)
    assert hub.asked == [("o/pipe", None, TOKEN), ("o/lora", None, TOKEN)]
    assert TOKEN not in json.dumps(part.options())


def test_a_vlm_approver_asks_for_its_model_with_the_token(hub, tmp_path):
    hub.folders["o/vlm"] = tmp_path
    for kind in ("vlm", "shieldgemma", "detector"):
        options = {"labeler": f"{kind}:hub:o/vlm", "policy": Policy.default().to_dict()}
        with pytest.raises(BadInput, match="cannot be loaded"):
            load_part("approver", PartEntry("vlm", None, options), None, TOKEN)
    assert hub.asked == [("o/vlm", None, TOKEN)] * 3


def test_the_command_line_passes_its_token_on_to_the_guard(hub, guard_folder, tmp_path):
    run = CliRunner().invoke
    drawn = ["generate", "a quiet street", "--base", "tiny-sd", "--steps", "2", "--out", str(tmp_path / "out")]
    result = run(app, [*drawn, "--guard", "hub:o/guard", "--token", TOKEN])
    assert result.exit_code in (0, 3), result.output
    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 64)).save(picture)
    result = run(app, ["audit", str(picture), "--guard", "hub:o/guard"], env={"HF_TOKEN": TOKEN})
    assert result.exit_code in (0, 3), result.output
    result = run(app, ["doctor", "--guard", "hub:o/guard", "--token", TOKEN, "--json"])
    assert result.exit_code == 0, result.output
    assert hub.asked == [("o/guard", None, TOKEN)] * 3
