"""What ordinary keys learn of scores: two reports whose scores have the same decimal are the same to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import pytest
from fastapi.testclient import TestClient
from helpers import bright_guard, call
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from services import BAD, CALL, KEYS, OPERATOR, bearer, make

from guardpaint.guard import GuardPaint
from guardpaint.loop.report import AuditRecord, report_schema
from guardpaint.loop.report_page import render
from guardpaint.policy import Finding
from guardpaint.serve.app import create_app
from guardpaint.serve.disclosure import PHRASES, audited, for_owner, pictures_for, shown_to, widened, without_paths
from guardpaint.serve.jobs import Ask, Done, Job
from guardpaint.serve.metrics import Metrics
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, FlagsBright, PaintsFlat

ANN, OLGA = Key("ann"), Key("olga", "operator")
METER = "meter-secret-0123456"


@pytest.fixture(scope="module")
def drawn():
    """A report with everything in it: audits, tournaments, a repair, notes, a ladder and evidence."""
    guard = bright_guard(f_gate="off", band=0.3, doubt=0.0).configured()
    report = call(guard.attach(small.pipeline("sd")), steps=4).safety[0]
    assert any(t.candidates for s in report.steps for t in s.tournaments) and report.evidence
    report.final.audits.append(AuditRecord(64, "output", dict(report.steps[0].audits[0].scores), {"safe": 0.5}))
    report.final.ladder.append({"rung": "blur", "outcome": "passed"})
    return report


def rescored(report, nudge):
    """The report with every score moved by `nudge`, and everything that the guard derives from scores with it."""

    def moved(value, name=""):
        if isinstance(value, dict):
            return {k: moved(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [moved(v, name) for v in value]
        if not isinstance(value, float):
            return value
        bucket = round(value, 1)  # stay inside of it
        return min(max(bucket + nudge, 0.0), 1.0) if name in SCORES else value + abs(nudge) / 3

    other = json.loads(report.to_json())
    for part in ("steps", "final"):
        other[part] = moved(other[part])
    for step in other["steps"]:
        step["progress"], step["noise"] = 0.5, 0.5
        step["notes"] = [f"one more tournament: S {0.85 + nudge:.3f} after a repair", f"unknown {nudge}"]
        step["reason"] = f"adv_prob {0.44 + nudge:.3f} ≥ 0.40"
        step["timings"] = {"audit": 1.0 + nudge}
        step["cost"] = {"audits": 3 if nudge > 0 else 2}
        for audit in step["audits"]:
            audit["reason"] = step["reason"]
    return other


SCORES = ("adv_prob", "S", "F", "P", "B", "Q", "safe", "nudity", "violence", "value", "coverage", "cfg", "dilation",
          "feather", "jitter")  # fmt: skip


@given(st.floats(-0.049, 0.049), st.floats(-0.049, 0.049))
@settings(max_examples=60, deadline=None)
def test_scores_with_the_same_decimal_cannot_be_told_apart(drawn, first, second):
    one, other = for_owner(rescored(drawn, first)), for_owner(rescored(drawn, second))
    assert json.dumps(one) == json.dumps(other)
    shown = pictures_for(drawn.evidence, ANN)
    assert render(one, shown) == render(other, shown)


def test_an_owners_report_follows_the_schema(drawn):
    mine, theirs = shown_to(drawn, ANN), shown_to(drawn, OLGA)
    for report in (mine, theirs):
        jsonschema.validate(json.loads(json.dumps(report)), report_schema())
    assert theirs == drawn.to_dict() and mine.keys() == theirs.keys()


def test_owners_see_no_heat_maps_and_no_utilities(drawn):
    assert any(e.heat is not None for e in drawn.evidence)
    assert all(e.heat is None for e in pictures_for(drawn.evidence, ANN))
    own = render(shown_to(drawn, ANN), pictures_for(drawn.evidence, ANN))
    whole = render(shown_to(drawn, OLGA), pictures_for(drawn.evidence, OLGA))
    assert "heat map" in whole and "u = " in whole
    assert "heat map" not in own and "u = " not in own and len(own) < len(whole)


def test_notes_of_the_loop_are_known(drawn):
    """Every note that the loop can write has a phrase for owners, or is for operators on purpose."""
    from pathlib import Path

    import guardpaint.loop

    source = "".join(p.read_text() for p in Path(guardpaint.loop.__file__).parent.glob("*.py"))
    for phrase in PHRASES:
        assert phrase in source, phrase


def test_paths_are_base_names():
    known = {"policy": "/etc/guardpaint/policy.yaml", "x": ["C:\\models\\guard", "plain"], "n": 0.25}
    assert without_paths(known) == {"policy": "policy.yaml", "x": ["guard", "plain"], "n": 0.25}
    assert without_paths("no log at '/var/log/a b.jsonl', /x/") == "no log at 'a b.jsonl', x"


def test_errors_are_not_quoted_to_owners(drawn):
    failed = replace(drawn, errors=["AuditLogError: /var/log/audit.jsonl: S 0.123 at append"])
    assert shown_to(failed, ANN)["errors"] == ["the guard failed"]
    assert "/var" in shown_to(failed, OLGA)["errors"][0]


class Scores(FlagsBright):
    """Finds nudity with a given probability in every picture."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def audit(self, images, prompts, noise):
        probs = {"safe": 1 - self.p, "nudity": self.p, "violence": 0.0}
        return [replace(a, adv_prob=self.p, probs=probs) for a in super().audit(images, prompts, noise)]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_streams_tell_no_more(stream):
    """Two services whose auditors differ in the third digit give the same answers, events, reports and pages."""
    seen = []
    for p in (0.61, 0.649):
        guard = GuardPaint(Scores(p), PaintsFlat())
        guard = guard.configured(policy=replace(guard.policy, last_resort=("block",)))
        with TestClient(create_app(make(guard=guard))) as test:
            body = {"prompt": "a person", "seed": 1, "stream": stream}
            text = test.post("/v1/images/generations", json=body, headers=bearer()).text
            (name,) = set(re.findall(r'"report": ?"([^"]+)"', text))
            own = test.get(f"/v1/reports/{name}", headers=bearer()).json()
            whole = test.get(f"/v1/reports/{name}", headers=bearer(OPERATOR)).json()
            page = test.get(f"/v1/reports/{name}?html=true", headers=bearer()).text
            shots = test.get(f"/v1/reports/{name}/evidence", headers=bearer()).json()
            assert whole["steps"][0]["audits"][0]["scores"]["adv_prob"] == pytest.approx(p)
            del own["seconds"]
            changing = (
                name,
                own.pop("request_id"),
                own.pop("created"),
                own["caller"]["request"],
            )
            everything = json.dumps([text, own, page, shots])
            for word in changing:
                everything = everything.replace(word, "…").replace(word[:12], "…")
            seen.append(re.sub(r"\d+\.\d\d s", "… s", everything))
    assert seen[0] == seen[1]


def test_uploads_tell_no_more():
    guards = [GuardPaint(Scores(p), PaintsFlat()) for p in (0.61, 0.649)]
    picture = Image.new("RGB", (60, 64), (150, 150, 150))
    picture.paste((255, 255, 255), (3, 3, 40, 30))
    one, other = (audited(g, picture, None, ANN) for g in guards)
    fine, finer = (audited(g, picture, None, OLGA) for g in guards)
    assert one == other and fine != finer
    assert one.boxes and all(v * 8 % side == 0 for x, y, w, h in one.boxes for v, side in ((x, 60), (y, 64)) if v)


def test_boxes_are_widened_to_a_grid():
    assert widened([3, 9, 10, 1], (64, 80)) == [0, 0, 16, 10]
    assert widened([0, 0, 64, 80], (64, 80)) == [0, 0, 64, 80]


def test_metrics_are_for_operators_and_for_their_own_key():
    keys = {**KEYS, METER: Key("prometheus", "metrics")}
    limits = Settings(keys=keys)
    service = Service(
        Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, limits), "m", limits, BAD
    )
    with TestClient(create_app(service)) as test:
        for secret, code in ((None, 401), ("wrong", 401), (bearer(), 403), (METER, 200), (OPERATOR, 200)):
            headers = secret if isinstance(secret, dict) else bearer(secret) if secret else {}
            answer = test.get("/metrics", headers=headers)
            assert answer.status_code == code, secret
            assert (b"audit_score" in answer.content) == (code == 200)
        assert test.get("/metrics").json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/me", "/v1/models", "/v1/policy"):
            assert test.get(path, headers=bearer(METER)).status_code == 403


def test_without_keys_metrics_hold_no_scores(drawn):
    texts = []
    for nudge in (0.01, 0.02):
        metrics = Metrics(lambda: 0.0)
        other = replace(drawn, steps=[replace(s, audits=[replace(a, scores={**a.scores, "adv_prob": nudge}) for a in s.audits])
                                      for s in drawn.steps])  # fmt: skip
        metrics.count([other])
        assert b"audit_score" in metrics.text()
        texts.append(b"\n".join(n for n in metrics.text(scores=False).splitlines() if b"_created" not in n))
    assert texts[0] == texts[1] and b"guardpaint_pictures_total" in texts[0] and b"stage_seconds_bucket" in texts[0]


def test_the_reason_of_an_answer_names_no_rule():
    service = make()
    try:
        (job,) = [Job("a", 1, Ask(2, 3.0, (64, 64)), "ann")]
        report = call(bright_guard().attach(small.pipeline("sd")), steps=3).safety[0]
        report.steps[0].triggered, report.steps[0].category = True, "nudity"
        report.steps[0].reason = Finding("nudity", "p(nudity) 0.734 ≥ 0.731").reason
        assert service.item(job, Done(None, report), "b64_json", "").safety.reason == "looks like nudity"
    finally:
        service.worker.close()
