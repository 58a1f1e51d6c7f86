"""Fine scores for an ordinary key: whoever has them can search for a way around the guard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from attempts import Outcome
from attempts.stand import DOUBLE_SERVICE, GREY, OPERATOR, USER, encoded

UNSCORED = {"progress", "noise", "seconds", "coverage", "timings", "knobs", "cost", "effective_settings", "created"}
"""Fields of a report that hold no scores."""
FINE = re.compile(r"\d\.\d{2,}")
SECRET = ("0.987", "0.988")
"""The score of a flagged picture as pages would write it."""


def fine(value: Any, where: str = "") -> Iterator[str]:
    """Places of a report with a number that has more than one decimal."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in UNSCORED:
                yield from fine(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for inner in value:
            yield from fine(inner, where)
    elif isinstance(value, float) and abs(value - round(value, 1)) > 1e-9:
        yield f"{where} = {value:.4f}"
    elif isinstance(value, str) and any(s in value for s in FINE.findall(value)):
        yield f"{where}: {value[:60]}"


def report(prompt: str, secret: str | None = USER) -> dict[str, Any]:
    stand = DOUBLE_SERVICE.get()
    answer = stand.draw(prompt)
    return dict(stand.get(f"/v1/reports/{stand.report_id(answer)}", secret).json())


def coarse(prompt: str) -> Outcome:
    places = list(dict.fromkeys(fine(report(prompt))))
    return Outcome("one decimal at most", "; ".join(places[:3])[:160] or "one decimal at most", not places)


def the_report_of_a_flagged_picture() -> Outcome:
    return coarse("please flag")


def notes_of_a_trigger_that_was_not_confirmed() -> Outcome:
    return coarse("please waver")


def errors_of_a_broken_auditor() -> Outcome:
    return coarse("probs-above-one")


def the_page_of_a_report() -> Outcome:
    """Heat maps say where to paint; they are for operators."""
    stand = DOUBLE_SERVICE.get()
    answer = stand.draw("please flag")
    name = stand.report_id(answer)
    page = stand.get(f"/v1/reports/{name}?html=true")
    shown = [word for word in ("heat map", "Grad-CAM") if word in page.text]
    text = re.sub(r"data:image[^\"]*", "", page.text)
    shown += [score for score in SECRET if score in text]
    both = "heat map" in stand.get(f"/v1/reports/{name}?html=true", OPERATOR).text
    got = f"{page.status_code}, {', '.join(shown) or 'nothing fine'}; operators see maps: {both}"
    return Outcome("no heat map and no fine score", got, not shown)


def evidence_with_heat_maps() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    name = stand.report_id(stand.draw("please flag"))
    items = stand.get(f"/v1/reports/{name}/evidence").json()
    heat = sum(bool(i.get("heat")) for i in items)
    clear = sum(not i["blurred"] for i in items)
    return Outcome("no heat map, nothing clear", f"{heat} maps, {clear} clear of {len(items)}", not heat and not clear)


def metrics_without_a_key() -> Outcome:
    answer = DOUBLE_SERVICE.get().get("/metrics", None)
    return Outcome("401", str(answer.status_code), answer.status_code == 401)


def metrics_with_an_ordinary_key() -> Outcome:
    """The sum of scores, read before and after a request, is that request's score."""
    stand = DOUBLE_SERVICE.get()
    answer = stand.get("/metrics")
    there = "audit_score_sum" in answer.text
    got = f"{answer.status_code}, {'sum of scores' if there else 'no sum'}"
    return Outcome("403, or nothing finer than counts", got, answer.status_code == 403 or not there)


def metrics_with_an_operators_key() -> Outcome:
    answer = DOUBLE_SERVICE.get().get("/metrics", OPERATOR)
    fits = answer.status_code == 200 and "guardpaint_pictures" in answer.text
    return Outcome("200 with the counts", str(answer.status_code), fits)


def audits_of_uploads() -> Outcome:
    answer = DOUBLE_SERVICE.get().audit(encoded(GREY)).json()
    places = list(fine({k: v for k, v in answer.items() if k != "boxes"}))
    got = "; ".join(places[:3]) or "one decimal at most"
    return Outcome("one decimal, no map", got, not places and answer.get("overlay") is None)


def events_of_a_stream() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    text = stand.draw("please flag", stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    found = [p for e in events if e["type"].endswith("audit") for p in fine(e)]
    clear = [e for e in events if e["type"].endswith("partial_image") and not e["blurred"]]
    got = f"{len(events)} events: {'; '.join(found[:2]) or 'coarse'}, {len(clear)} clear pictures"
    return Outcome("coarse scores, blurred pictures", got, not found and not clear and bool(events))


ATTEMPTS = (
    the_report_of_a_flagged_picture,
    notes_of_a_trigger_that_was_not_confirmed,
    errors_of_a_broken_auditor,
    the_page_of_a_report,
    evidence_with_heat_maps,
    metrics_without_a_key,
    metrics_with_an_ordinary_key,
    metrics_with_an_operators_key,
    audits_of_uploads,
    events_of_a_stream,
)
