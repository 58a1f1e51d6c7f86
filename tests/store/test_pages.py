"""Templates escape what they show and complain about what they were not given."""

from __future__ import annotations

import base64
import io

import pytest
from jinja2 import UndefinedError
from PIL import Image

from guardpaint.store.images import data_url, png_bytes
from guardpaint.store.pages import environment, render

RED = Image.new("RGB", (400, 100), (200, 10, 20))


def opened(url):
    head, data = url.split(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_a_data_url_holds_the_picture():
    assert opened(data_url(RED)).getpixel((399, 99)) == (200, 10, 20)
    assert png_bytes(RED).startswith(b"\x89PNG")


def test_a_data_url_scales_down_and_leaves_the_picture_alone():
    assert opened(data_url(RED, 224)).size == (224, 56) and RED.size == (400, 100)
    assert opened(data_url(RED, 1000)).size == (400, 100)


def test_every_template_compiles_and_needs_no_outside_file():
    names = environment().list_templates(extensions=["j2"])
    assert {"base.html.j2", "report.html.j2", "gallery.html.j2", "review.html.j2", "evaluation.html.j2"} <= set(names)
    for name in names:
        source, path, _ = environment().loader.get_source(environment(), name)
        environment().get_template(name)
        assert "http" not in source and "<link" not in source and "| safe" not in source, path


def test_values_are_escaped():
    card = {"key": 'a"b', "category": "nudity", "safe_prompt": "a <b>coat</b>", "pictures": [("source", RED)]}
    page = render("review.html.j2", title="<t>", cards=[card])
    assert "a &lt;b&gt;coat" in page and "<b>coat" not in page and 'data-key="a&#34;b"' in page
    assert "<title>&lt;t&gt;</title>" in page and page.startswith("<!doctype html>")


def test_a_missing_value_is_an_error():
    with pytest.raises(UndefinedError, match="cards"):
        render("review.html.j2", title="t")


def test_the_review_page_keeps_its_ids_and_keys():
    page = render("review.html.j2", title="t", cards=[])
    assert "Nothing waits for a decision." in page
    for piece in ('id="save"', 'id="n"', "'jf'", "approvals.json"):
        assert piece in page


def test_the_gallery_links_guarded_pictures_to_their_reports():
    drawn = {"plain": RED, "image": RED, "prompt": "a <hat>", "verdict": "clean, bit-identical", "page": "p.html"}
    sections = [{"base": "mini-sd", "pipeline": "X", "strips": [{"title": "benign prompts", "drawn": [drawn]}]}]
    page = render("gallery.html.j2", title="GuardPaint demo", notice="Small models.", sections=sections)
    assert page.count("<figure") == 2 and page.count('<a href="p.html"><figure>') == 1
    assert "<h2>mini-sd: X</h2>" in page and "a &lt;hat&gt;" in page


def test_the_evaluation_page_says_what_is_met():
    metrics = {
        "a.<b>": {"value": 0.12345, "n": 7, "ci": [0.1, 0.2], "goal": "<=0.04", "met": False},
        "c": {"value": None, "n": 0},
    }
    sections = [
        {"heading": "Defences", "text": "", "picture": None, "alt": "", "metrics": metrics, "table": ()},
        {"heading": "", "text": "A note.", "picture": RED, "alt": "front", "metrics": {}, "table": ()},
    ]
    page = render("evaluation.html.j2", title="t", count=2, note="n", sections=sections)
    row = "<tr><td>a.&lt;b&gt;</td><td>0.1235</td><td>0.1 … 0.2</td><td>7</td><td>&lt;=0.04: <b>NOT met</b></td></tr>"
    assert row in page and "<tr><td>c</td><td>–</td><td></td><td>0</td><td></td></tr>" in page
    assert page.count("<table>") == 1 and '<img alt="front" src="data:image/png' in page and "<p>A note.</p>" in page
