"""Calibrating a guard: bands, refusals, the guard that uses them, drift from its own log."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers import call
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.config import Band, Calibration, GuardConfig
from guardpaint.data import views
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.evaluate import calibrate
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat
from paperdolls import views as drawn


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("calibration")
    small.guard().save_pretrained(root / "guard")
    small.auditor().save_pretrained(root / "auditor")
    views.store([drawn.clean(small.vae(4), list(range(300)))], root / "views" / "mini-sd-calibration.pt")
    return root


def band(start=0.0, **thresholds):
    return Band(start, thresholds, 0.4, {})


def test_the_command_writes_thresholds_into_the_guard(made):
    out = made / "calibration.json"
    args = [
        "--auditor",
        made / "auditor",
        "--views",
        made / "views",
        "--out",
        out,
        "--alpha",
        0.1,
        "--guard",
        made / "guard",
    ]
    result = CliRunner().invoke(app, ["calibrate", *map(str, args), "--band", "0"])
    assert result.exit_code == 0, result.output
    guard = GuardPaint.from_pretrained(made / "guard")
    found = guard.config.calibration
    assert found.alpha == 0.1 and found.bands[0].n["nudity"] > 20 and len(found.data) == 64
    assert guard.config.mask_threshold == "calibrated" and guard.config.mask_level_at(1.0) == found.bands[0].mask_level
    assert GuardConfig.from_dict(json.loads(json.dumps(guard.config.to_dict()))) == guard.config


def test_a_guard_whose_auditor_was_exchanged_is_not_loaded(tmp_path):
    """Thresholds promise something of one auditor: with another one, or with its class weights taken out, they do not."""
    auditor = small.auditor()
    told = Calibration(0.1, 0.1, "x", (band(0.0, nudity=0.3),), auditor.identity())
    parts = small.guard().parts
    GuardPaint(auditor, parts.repairer, config=GuardConfig(calibration=told)).save_pretrained(tmp_path / "guard")
    assert GuardPaint.from_pretrained(tmp_path / "guard").config.calibration == told
    weighted = small.auditor()
    weighted.config = replace(weighted.config, class_weights=(1.0, 5.0, 2.0))
    for i, other in enumerate((small.auditor(1), weighted)):
        folder = tmp_path / f"other{i}"
        GuardPaint(other, parts.repairer, config=GuardConfig(calibration=told)).save_pretrained(folder)
        with pytest.raises(BadCheckpoint, match="calibrated for another auditor"):
            GuardPaint.from_pretrained(folder)


def test_the_promise_holds_on_the_calibration_set_itself(made):
    """At the found thresholds, at most a share α of each category is missed there."""
    data = views.load_views(made / "views" / "mini-sd-calibration.pt")
    from guardpaint.audit.model import AuditorScorer

    policy = Policy.default()
    found = calibrate.scored(AuditorScorer.from_pretrained(made / "auditor"), data)
    thresholds = calibrate.calibrate(data, found, policy, 0.1, 0.1, [0.0])[0].bands[0].thresholds
    for c in range(1, len(policy.names)):
        rows = [i for i in range(len(data)) if data.category[i] == c]
        missed = [not found[i].found(policy, thresholds) for i in rows]
        assert sum(missed) / len(rows) <= 0.1


def test_too_few_examples_are_refused_with_a_number(made):
    args = ["--auditor", made / "auditor", "--views", made / "views", "--out", made / "x.json", "--alpha", 0.001]
    result = CliRunner().invoke(app, ["calibrate", *map(str, args), "--band", "0"])
    assert isinstance(result.exception, BadInput)
    assert "examples of nudity from progress 0 to 1: a risk of 0.001 needs at least 999" in str(result.exception)
    with pytest.raises(BadInput, match="no views of split calibration"):
        calibrate.run(made / "auditor", made, made / "x.json", calibrate.Promise(0.1, 0.1, [0.0]))


def test_a_band_holds_until_the_next():
    found = Calibration(0.1, 0.1, "x", (band(0.0, nudity=0.2), band(0.7, nudity=0.5)))
    assert found.at(0.0).thresholds == found.at(0.69).thresholds == {"nudity": 0.2}
    assert found.at(0.7).thresholds == found.at(1.0).thresholds == {"nudity": 0.5}


@pytest.mark.parametrize(
    "bands", [(), (band(0.5),), (band(0.0), band(0.0)), (band(0.0), band(0.9), band(0.7))], ids=str
)
def test_bands_out_of_order_are_refused(bands):
    with pytest.raises(BadConfig, match="the first must start at 0"):
        Calibration(0.1, 0.1, "x", bands)


def test_bad_values_are_refused():
    with pytest.raises(BadConfig, match="lie in"):
        band(0.0, nudity=1.5)
    with pytest.raises(BadConfig, match="alpha=0"):
        Calibration(0, 0.1, "x", (band(),))
    with pytest.raises(BadConfig, match="calibration"):
        Calibration.from_dict({"alpha": 0.1})


def test_calibration_only_tightens_and_only_in_its_band():
    """A guard that finds nothing flags a nude from 0.001 on in the last band, and nothing before."""

    class Faint(AlwaysSafe):
        def audit(self, images, prompts, noise):
            found = super().audit(images, prompts, noise)
            for a in found:
                object.__setattr__(a, "probs", {"safe": 0.98, "nudity": 0.015, "violence": 0.005})
            return found

    pipe = small.pipeline("sd")
    late = Calibration(0.1, 0.1, "x", (band(0.0), band(1.0, nudity=0.01)))
    plain = call(GuardPaint(Faint(), PaintsFlat()).attach(pipe)).safety[0]
    tight = call(GuardPaint(Faint(), PaintsFlat(), config=GuardConfig(calibration=late)).attach(pipe)).safety[0]
    assert plain.status == "clean" and tight.triggered
    assert [s.triggered for s in tight.steps] == [s.progress >= 1.0 for s in tight.steps]


def test_drift_is_read_from_the_guards_own_log(made, tmp_path):
    from guardpaint.loop.audit_log import AuditLog

    guard = small.guard()
    guard.audit_log = AuditLog(tmp_path / "log.jsonl")
    call(guard.attach(small.pipeline("sd")))
    guard.audit_log.close()
    reference = {"reference": {"edges": [0.2, 0.4], "shares": [0.98, 0.01, 0.01], "n": 1000}}
    (tmp_path / "c.json").write_text(json.dumps(reference))
    with pytest.raises(BadInput, match="audits in it; fewer than 100 would look like drift by chance"):
        calibrate.drift(tmp_path / "c.json", tmp_path / "log.jsonl")
    line = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "long.jsonl").write_text(line * 100)
    _, n = calibrate.drift(tmp_path / "c.json", tmp_path / "long.jsonl")
    assert n == 100 * len(json.loads(line)["report"]["steps"])


@pytest.mark.parametrize(("score", "drifted"), [(0.1, False), (0.9, True)])
def test_drift_by_hand(tmp_path, score, drifted):
    """All scores in the reference's biggest bin: almost nothing; all in a bin of 1 %: (1 − 0.01)·ln 100 and more."""
    steps = [{"audits": [{"scores": {"adv_prob": score}}]}] * 100
    (tmp_path / "log.jsonl").write_text(json.dumps({"report": {"steps": steps}}) + "\n")
    reference = {"reference": {"edges": [0.2, 0.4], "shares": [0.98, 0.01, 0.01], "n": 1000}}
    (tmp_path / "c.json").write_text(json.dumps(reference))
    index, n = calibrate.drift(tmp_path / "c.json", tmp_path / "log.jsonl")
    assert n == 100 and (index > 4.0 if drifted else index < 0.2)


def test_the_audit_command_follows_the_calibration_too(tmp_path):
    """A picture that the plain guard calls benign is flagged once calibration asks for next to nothing."""
    from PIL import Image
    from typer.testing import CliRunner

    from guardpaint.cli.main import app

    Image.new("RGB", (64, 64), "grey").save(tmp_path / "a.png")
    verdicts = []
    for name, calibration in (("plain", None), ("tight", Calibration(0.1, 0.1, "x", (band(0.0, nudity=0.0),)))):
        parts = small.guard().parts
        guard = GuardPaint(parts.auditor, parts.repairer, config=GuardConfig(calibration=calibration))
        guard.save_pretrained(tmp_path / name)
        result = CliRunner().invoke(app, ["audit", str(tmp_path / "a.png"), "--guard", str(tmp_path / name), "--json"])
        verdicts.append(json.loads(result.stdout)[0]["reason"])
    assert verdicts[0] != verdicts[1] and "≥ 0.000" in verdicts[1]
