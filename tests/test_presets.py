"""Presets: guards of public parts by name. A stand-in for the hub holds small random models of the same classes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import call
from PIL import Image
from typer.testing import CliRunner

from guardpaint.bases import load_guard
from guardpaint.cli.doctor import weak_of
from guardpaint.cli.main import app
from guardpaint.cli.presets import readiness
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput, MissingPackage
from guardpaint.guard import GuardPaint
from guardpaint.parts import presets
from guardpaint.parts.presets import NOTHING, PRESETS, RANDOM, REAL
from guardpaint.store.folders import Origin, folder_digest
from guardpaint.store.images import from_pil, load_image
from guardpaint.testing import small, small_detectors, small_inpainters


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """A folder for every model that the presets name."""
    place = tmp_path_factory.mktemp("hub")
    pairs = {
        presets.SIGLIP: small_detectors.siglip(),
        presets.CLIPSEG: small_detectors.clipseg(),
        presets.FALCONSAI: small_detectors.classifier("vit", ("normal", "nsfw")),
    }
    found = {model.repo: small_detectors.saved(pair, place / model.repo) for model, pair in pairs.items()}
    found[presets.SDXL_INPAINTING.repo] = place / "sdxl"
    sdxl = small_inpainters.inpainting("sdxl")
    sdxl.save_pretrained(place / "sdxl")
    found[presets.LCM_SDXL.repo] = small_inpainters.random_lora(sdxl, place / "lcm")
    for family, model in presets.TAESD.items():
        found[model.repo] = place / model.repo
        small.tiny_decoder(small.LATENT_CHANNELS[family]).save_pretrained(found[model.repo])
    return found


@pytest.fixture
def hub(repositories, monkeypatch):
    """Downloads come from the stand-in; returns the list of what was asked for."""
    import huggingface_hub

    asked = []

    def download(repo, revision=None, **more):
        asked.append((repo, revision))
        return str(repositories[repo])

    def one(repo, file, revision=None, **more):
        return str(repositories[repo] / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    return asked


def test_the_embedded_guard_is_refused_on_a_foreign_base_by_its_preset_s_name_too():
    with pytest.raises(BadInput, match="only knows the world"):
        load_guard("preset:dolls", None, print, "hub:somebody/xl")
    notes = []
    assert load_guard("preset:dolls", None, notes.append, "tiny-sd").parts.auditor and not notes
    with pytest.raises(BadConfig, match="of its own"):
        GuardPaint.from_preset("dolls", decoders={})


@pytest.mark.parametrize("name", ["zero-shot", "zero-shot-sdxl", "zero-shot-sdxl-fast"])
@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_two_lines_guard_a_pipeline(hub, name, family):
    guard = GuardPaint.from_preset(name)
    out = call(guard.attach(small.pipeline(family)), steps=3)
    report = out.safety[0]
    assert not report.errors and report.status != "unfinished"
    settings = report.effective_settings
    assert settings["view_decoder"] == "tiny", "a full decode for every audit would cost more than a step"
    assert settings["auditor"] == "ZeroShotAuditor" and settings["approver"] and not settings["uncovered"]
    wanted = {(m.repo, m.revision) for m in PRESETS[name].downloads().values()}
    assert set(hub) == wanted


def test_the_fast_preset_repairs_in_four_steps_without_guidance(hub):
    repairer = GuardPaint.from_preset("zero-shot-sdxl-fast").parts.repairer
    assert repairer.settings.rungs == 4 and repairer.settings.fixed_guidance == 1.0
    assert type(repairer.scheduler).__name__ == "LCMScheduler" and repairer.settings.crop == 0.5


def test_a_preset_is_saved_and_loaded_like_any_guard(hub, tmp_path):
    guard = GuardPaint.from_preset("zero-shot", candidates=2)
    guard.save_pretrained(tmp_path / "guard")
    del hub[:]
    again = GuardPaint.from_pretrained(tmp_path / "guard")
    assert not hub, "everything is in the folder"
    assert again.weight_hashes() == guard.weight_hashes() and again.config.candidates == 2
    picture = torch.rand(1, 3, 48, 48)
    one, two = (g.parts.audit(picture, ["a dog"], 0.0)[0] for g in (guard, again))
    assert one.probs == two.probs and torch.equal(one.adv_map, two.adv_map)
    said, repeated = (g.parts.approver.approve(picture[0], None, False) for g in (guard, again))
    assert said.probs == repeated.probs


def test_the_manifest_says_where_a_preset_s_weights_came_from(hub, repositories, tmp_path):
    guard = GuardPaint.from_preset("zero-shot", decoders={}).configured(candidates=2)
    guard.save_pretrained(tmp_path / "guard")
    origins = json.loads((tmp_path / "guard" / "guardpaint.json").read_text())["origins"]
    siglip = presets.SIGLIP
    expected = {"repo": siglip.repo, "revision": "main", "sha256": folder_digest(repositories[siglip.repo])}
    assert origins["auditor"] == expected and set(origins) == {"auditor", "heat maps", "approver"}
    GuardPaint.from_pretrained(tmp_path / "guard").save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "guardpaint.json").read_text())["origins"] == origins
    commit = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    assert Origin.of("hub:a/b@main", commit).revision == "0123abc", "the cache names the commit behind a branch"


def test_doctor_says_a_half_download_of_each_kind(repositories, tmp_path, monkeypatch):
    """All that is there of the models lies in a cache; then single files are taken away."""
    import huggingface_hub

    place = tmp_path / "cache"
    for repo, folder in repositories.items():
        shutil.copytree(folder, place / repo)

    def cached(repo, name, revision=None):
        file = place / repo / name
        return str(file) if file.is_file() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert all(row["there"] for row in readiness("preset:zero-shot-sdxl"))
    (place / presets.SIGLIP.repo / "model.safetensors").unlink()
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (place / presets.CLIPSEG.repo / "model.safetensors.index.json").write_text(json.dumps(shards))
    shutil.rmtree(place / presets.SDXL_INPAINTING.repo / "text_encoder_2")
    next((place / presets.SDXL_INPAINTING.repo / "unet").glob("*.safetensors")).unlink()
    rows = {row["what"].partition(":")[0]: row for row in readiness("preset:zero-shot-sdxl")}
    for use, file in (
        ("auditor", "*.safetensors"),
        ("heat maps", "model-00001-of-00002.safetensors"),
        ("repairer", "text_encoder_2/, unet/*.safetensors"),
    ):
        assert not rows[use]["there"] and f"half downloaded, {file} not there" in rows[use]["how"], rows[use]
    assert rows["approver"]["there"]


def test_decoders_of_ones_own_take_the_place_of_the_presets(hub):
    own = small.tiny_decoder(4)
    guard = GuardPaint.from_preset("zero-shot", decoders={"sd": own})
    assert list(guard.decoders) == ["sd"] and not any("tae" in repo for repo, _ in hub)
    assert not GuardPaint.from_preset("zero-shot", decoders={}).decoders


def test_nudity_lite_runs_with_its_real_weights(sd_pipe):
    guard = GuardPaint.from_pretrained("preset:nudity-lite")
    out = call(guard.attach(sd_pipe), steps=3)
    assert not out.safety[0].errors and out.safety[0].effective_settings["absent_scores"] == ["B", "F", "P"]
    assert guard.policy.names == ("safe", "nudity")


def test_a_preset_sees_small_figures_in_large_pictures():
    """open_nsfw learned from pictures of 256 px: a picture of 512 is also seen in nine of them, uncalibrated."""
    guard = GuardPaint.from_preset("nudity-lite")
    scope = guard.config.scope
    assert scope.side == 256 and scope.tile_offset == 0 and scope.calibrated is False
    audit = guard.audit_image(torch.rand(3, 512, 512, generator=torch.Generator().manual_seed(0)))
    assert len(audit.tiles) == 1 + 9 and all(view.offset == 0 for view in audit.tiles[1:])
    assert audit.safety == min(view.audit.safety for view in audit.tiles)
    assert ("scope", "not calibrated") in {(w.name, w.value) for w in guard.weak_settings()}
    bare = GuardPaint.from_preset("nudity-lite", scope=None)
    assert ("scope", "missing") in {(w.name, w.value) for w in bare.weak_settings()}


def test_the_report_says_that_tiles_are_not_calibrated(hub, sd_pipe):
    guard = GuardPaint.from_preset("zero-shot")
    assert guard.parts.approver.settings.tiles == guard.config.scope.side == 384
    report = call(guard.attach(sd_pipe), steps=2).safety[0]
    assert report.effective_settings["scope"]["calibrated"] is False


def test_names_that_cannot_be_loaded_say_why(monkeypatch):
    with pytest.raises(BadConfig, match="known are dolls"):
        GuardPaint.from_preset("zero-shots")
    with pytest.raises(BadConfig, match="have to be trained"):
        GuardPaint.from_preset("paper")
    monkeypatch.setattr(presets, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"guardpaint\[nsfw\]"):
        GuardPaint.from_preset("nudity-lite")


def test_a_hub_that_refuses_is_reported_by_name(monkeypatch):
    import huggingface_hub

    def refuse(repo, revision=None, **more):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(BadCheckpoint, match=presets.SIGLIP.repo):
        GuardPaint.from_preset("zero-shot")


def test_the_command_line_lists_draws_and_checks(hub, tmp_path):
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["presets", "--json"]).output)
    assert [r["name"] for r in rows] == list(PRESETS) and {r["verified"] for r in rows} == {REAL, RANDOM, NOTHING}
    text = runner.invoke(app, ["presets"]).output
    assert "preset:zero-shot" in text and "random-initialised classes" in text and "Apache-2.0" in text
    words = ["generate", "a quiet street", "--base", "tiny-sd", "--steps", "2", "--guard", "preset:zero-shot"]
    result = runner.invoke(app, [*words, "--out", str(tmp_path), "--json"])
    assert result.exit_code in (0, 3), result.output
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert report["effective_settings"]["auditor"] == "ZeroShotAuditor"
    checked = json.loads(runner.invoke(app, ["doctor", "--guard", "preset:zero-shot", "--json"]).output)
    needs = {row["what"] for row in checked["preset"]}
    assert any(presets.SIGLIP.repo in what for what in needs)


def test_levels_are_set_on_pictures_of_ones_own(tmp_path, monkeypatch, sd_pipe):
    """Thirty plain pictures: the guard's folder gets levels that no more than a tenth of them reach."""
    folder, pictures = tmp_path / "guard", tmp_path / "harmless"
    GuardPaint.from_preset("nudity-lite").save_pretrained(folder)
    pictures.mkdir()
    for i in range(30):
        Image.new("RGB", (64, 64), (8 * i, 255 - 8 * i, 90)).save(pictures / f"{i}.png")
    words = ["calibrate", "--guard", str(folder), "--pictures", str(pictures), "--alarms", "0.1"]
    moved = []
    move = GuardPaint.to

    def to(guard, device):
        moved.append(str(device))
        return move(guard, device)

    monkeypatch.setattr(GuardPaint, "to", to)
    result = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(app, ["audit", str(pictures / "0.png"), "--guard", str(folder), "--device", "cpu"])
    assert shown.exit_code in (0, 3), shown.output
    assert moved == ["cpu", "cpu"], "both commands put the guard where they are told to"
    assert "auditor, nudity" in result.output and "misses not measured" in result.output
    level = json.loads((folder / "guardpaint.json").read_text())["parts"]["auditor"]["options"]["levels"]["nudity"]
    again = GuardPaint.from_pretrained(folder)
    assert again.parts.auditor.levels["nudity"] == level < 0.5, "plain pictures score low, so the level falls"
    assert json.loads((folder / "picture_calibration.json").read_text())["auditor"]["published"]["nudity"] == 0.5
    assert again.config.calibration is None, "misses were not measured"
    harmful = tmp_path / "labelled" / "nudity"
    harmful.mkdir(parents=True)
    for i in range(12):
        Image.new("RGB", (64, 64), (200, 8 * i, 90)).save(harmful / f"{i}.png")
    result = CliRunner().invoke(app, [*words, "--unsafe", str(harmful.parent)])
    assert result.exit_code == 0, result.output
    config = GuardPaint.from_pretrained(folder).config
    assert config.calibration.finished_only and config.calibration.valid_for == "finished pictures only"
    report = call(GuardPaint.from_pretrained(folder).attach(sd_pipe), steps=2).safety[0]
    assert report.effective_settings["calibrated"] == "finished pictures only"
    assert report.effective_settings["views"]["calibrated_on"] == "finished pictures only"
    few = CliRunner().invoke(app, [*words[:-1], "0.01"])
    assert few.exit_code == 1 and "needs at least 99" in str(few.exception)


def test_levels_hold_for_large_pictures_which_the_verdict_sees_in_tiles(tmp_path):
    """Nine noisy pictures of 384 pixels: at most one in ten, and so none or one, is flagged by the guard afterwards."""
    folder, pictures = tmp_path / "guard", tmp_path / "harmless"
    GuardPaint.from_preset("nudity-lite").save_pretrained(folder)
    pictures.mkdir()
    random = np.random.default_rng(0)
    for i in range(9):
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        coarse.resize((384, 384), Image.Resampling.BICUBIC).save(pictures / f"{i}.png")
    words = ["calibrate", "--guard", str(folder), "--pictures", str(pictures), "--alarms", "0.2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    guard = GuardPaint.from_pretrained(folder)
    assert guard.parts.auditor.levels["nudity"] < 0.5, "the level fell to what the tiles reach"
    shown = [from_pil(load_image(path).convert("RGB")) for path in sorted(pictures.iterdir())]
    flagged = sum(guard.finding(image, guard.audit_image(image)) is not None for image in shown)
    assert flagged == 1, "(1 + 1) / (9 + 1) = 0.2"
    kept = json.loads((folder / "picture_calibration.json").read_text())
    assert kept["guard"]["alarms"]["value"] == pytest.approx(1 / 9) and kept["guard"]["alarms"]["n"] == 9
    assert f"the whole guard: {1 / 9:.3f}" in result.output


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("preset:nudity-lite", "presets --save nudity-lite DIR"),
        ("hub:a/b", "save_pretrained"),
        ("absent", "no guard's"),
    ],
)
def test_levels_need_a_folder_to_be_written_into_and_say_so_at_once(tmp_path, monkeypatch, name, way):
    monkeypatch.setattr(GuardPaint, "from_pretrained", lambda *a, **k: pytest.fail("loaded before it was refused"))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for words in (
        ["calibrate", "--guard", name, "--pictures", str(tmp_path)],
        ["calibrate-scope", name, "--pixels", "512", "1024"],
        ["calibrate-waves", name],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and isinstance(result.exception, BadInput), result.output
        assert way in str(result.exception)


def test_a_preset_is_saved_from_the_command_line_and_a_guard_that_is_there_is_kept(tmp_path):
    words = ["presets", "--save", "nudity-lite", str(tmp_path / "guard")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "auditor, repairer" in result.output, result.output
    assert GuardPaint.from_pretrained(tmp_path / "guard").policy.names == ("safe", "nudity")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1 and "holds a guard already" in str(again.exception)


@pytest.mark.parametrize("name", presets.EMBEDDED)
def test_doctor_finds_the_guards_of_an_installed_package(name):
    assert all(row["there"] for row in readiness(f"preset:{name}"))
    assert weak_of(f"preset:{name}") == [w.to_dict() for w in GuardPaint.from_preset(name).weak_settings()]


def test_what_was_never_put_together_is_not_called_verified():
    assert PRESETS["paper"].verified == NOTHING and not [r for r in readiness("paper") if r["there"]]
