"""Settings that open a door are said aloud, listed in reports and refused by the service."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import yaml
from helpers import call
from services import BAD, make
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.config import Band, Calibration, GuardConfig, Scope
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.serve.settings import Settings
from guardpaint.serve.start import Options, load_worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat
from guardpaint.verify.weak import refuse_weak, weak_settings

BANDS = (Band(0.0, {"nudity": 0.5}, None, {"nudity": 100}),)
SCOPE = Scope(256, (8, 1024), (0.0, 20.0), (1, 100))
SOUND = GuardConfig(calibration=Calibration(0.05, 0.1, "0" * 64, BANDS, auditor="f" * 64), scope=SCOPE)
KEEP = replace(Policy.default(), last_resort=("blur", "keep"))
WEAK = {
    "off": (Policy.default(), SOUND.with_(mode="off"), "mode"),
    "monitor": (Policy.default(), SOUND.with_(mode="monitor"), "mode"),
    "keep": (KEEP, SOUND, "last_resort"),
    "trigger 1.0": (replace(Policy.default(), trigger=1.0), SOUND, "trigger"),
    "no calibration": (Policy.default(), GuardConfig(scope=SCOPE), "calibration"),
    "no scope": (Policy.default(), SOUND.with_(scope=None), "scope"),
    "uncalibrated scope": (Policy.default(), SOUND.with_(scope=replace(SCOPE, calibrated=False)), "scope"),
    "nobody's": (Policy.default(), SOUND.with_(calibration=replace(SOUND.calibration, auditor="")), "calibration"),
    "alpha": (Policy.default(), SOUND.with_(calibration=replace(SOUND.calibration, alpha=0.9)), "calibration"),
}


@pytest.mark.parametrize(("policy", "config", "name"), WEAK.values(), ids=WEAK)
def test_each_weak_setting_is_found_and_refused(policy, config, name):
    assert [w.name for w in weak_settings(policy, config)] == [name]
    with pytest.raises(BadConfig, match=name):
        refuse_weak(policy, config)
    if name == "mode":
        with pytest.raises(BadConfig, match="mode"):
            refuse_weak(policy, config, ["trigger", "last_resort", "calibration"])
    else:
        refuse_weak(policy, config, [name])


def test_a_sound_guard_has_none():
    assert weak_settings(Policy.default(), SOUND) == []
    refuse_weak(Policy.default(), SOUND)


def test_names_that_cannot_be_accepted_are_errors():
    for name in ("mode", "everything"):
        with pytest.raises(BadConfig, match="can accept last_resort, trigger, calibration, scope"):
            refuse_weak(Policy.default(), SOUND, [name])


@pytest.fixture(scope="module")
def weak_folder(tmp_path_factory):
    """A guard folder by somebody who wants nothing to be blocked."""
    folder = tmp_path_factory.mktemp("weak") / "guard"
    small.guard(mode="off").save_pretrained(folder)
    policy = {**Policy.default().to_dict(), "trigger": 1.0, "last_resort": ["keep"]}
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
    return folder


def test_a_weak_guard_folder_is_warned_of_by_name(weak_folder):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        guard = GuardPaint.from_pretrained(weak_folder)
    said = [str(w.message) for w in told if str(weak_folder) in str(w.message)]
    assert len(said) == 5
    for name in ("mode is off", "last_resort is keep", "trigger is 1", "scope is missing", "calibration is missing"):
        assert any(name in s for s in said), name
    assert [w.name for w in guard.weak_settings()] == ["mode", "last_resort", "trigger", "scope", "calibration"]
    with pytest.warns(UserWarning, match="scope is missing: large pictures are only seen whole"):
        guard.attach(small.pipeline("sd"))


def test_a_report_lists_them(sd_pipe):
    report = call(GuardPaint(AlwaysSafe(), PaintsFlat(), policy=KEEP).attach(sd_pipe), steps=2).safety[0]
    found = report.to_dict()["effective_settings"]["weak"]
    assert [w["name"] for w in found] == ["last_resort", "scope", "calibration"] and all(w["why"] for w in found)
    sound = call(GuardPaint(AlwaysSafe(), PaintsFlat(), config=SOUND).attach(sd_pipe), steps=2).safety[0]
    assert sound.effective_settings["weak"] == []


def test_a_scope_that_nobody_calibrated_is_said_by_every_door_and_refused_by_the_service(sd_pipe, tmp_path):
    guard = small.guard(calibration=SOUND.calibration, scope=replace(SCOPE, calibrated=False))
    guard = guard.configured(calibration=replace(SOUND.calibration, auditor=guard.parts.auditor.digest()))
    with pytest.warns(UserWarning, match="scope is not calibrated: nobody has measured"):
        guard.attach(sd_pipe)
    guard.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="scope is not calibrated"), pytest.raises(BadConfig, match="--weak scope"):
        load_worker(options(tmp_path), Settings())
    with pytest.warns(UserWarning, match="scope is not calibrated"):
        load_worker(options(tmp_path, "scope"), Settings()).close()


def options(folder, *weak):
    return Options("tiny-sd", str(folder), None, "127.0.0.1", 0, None, 4, 1, False, None, None, None, None, weak=weak)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_service_refuses_a_weak_folder(weak_folder, tmp_path):
    with pytest.raises(BadConfig, match="mode is off.*keep.*trigger is 1.*scope is missing.*calibration is missing"):
        load_worker(options(weak_folder), Settings())
    with pytest.raises(BadConfig, match="mode is off"):
        load_worker(options(weak_folder, "last_resort", "trigger", "calibration", "scope"), Settings())
    small.guard().save_pretrained(tmp_path)
    with pytest.raises(BadConfig, match="--weak scope --weak calibration"):
        load_worker(options(tmp_path), Settings())
    load_worker(options(tmp_path, "calibration", "scope"), Settings()).close()


def test_the_embedded_guard_is_not_weak():
    pytest.importorskip("paperdolls")
    assert GuardPaint.embedded().weak_settings() == []


def test_a_running_service_takes_no_weaker_policy():
    service = make()
    try:
        with pytest.raises(BadConfig, match="trigger is 1"):
            service.worker.change_policy(replace(Policy.default(), trigger=1.0), "olga")
        with pytest.raises(BadConfig, match=r"trigger is 0\.9: a running service takes at most 0\.5"):
            service.worker.change_policy(replace(Policy.default(), trigger=0.9), "olga")
        service.worker.change_policy(replace(Policy.default(), trigger=0.2), "olga")
        assert service.worker.policy.trigger == 0.2 and service.self_test is BAD
    finally:
        service.worker.close()


def test_doctor_lists_them(weak_folder, monkeypatch):
    monkeypatch.setattr("guardpaint.cli.doctor.self_test", list)
    result = CliRunner().invoke(app, ["doctor", "--guard", str(weak_folder), "--json"])
    found = json.loads(result.output)["weak_settings"]
    assert [w["name"] for w in found] == ["mode", "last_resort", "trigger", "scope", "calibration"]
    shown = CliRunner().invoke(app, ["doctor", "--guard", str(weak_folder)])
    assert shown.exit_code == 0 and shown.output.count("WEAK") == 5
