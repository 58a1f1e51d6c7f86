"""The page in real Chromium: draw, watch, read the story, audit an upload, change the policy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import serving
from PIL import Image

from guardpaint.guard import GuardPaint
from guardpaint.serve.app import Service, create_app
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is tested in a real Chromium: install one (package chromium) to run this"
)
USER, OPERATOR = "user-secret-0123456", "operator-secret-012"


@pytest.fixture(scope="module")
def address():
    guard = GuardPaint(FlagsBright(gain=1.2), PaintsFlat()).configured(retain_evidence=False, f_gate="off")
    call = {"num_inference_steps": 4, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
    keys = {USER: Key("ann", per_minute=600), OPERATOR: Key("olga", "operator", 600)}
    bad = Image.new("RGB", (64, 64), "white")
    service = Service(
        Worker(guard, small.pipeline("sd"), call, Settings(keys=keys)), "tiny-sd", Settings(keys=keys), bad
    )
    with serving(create_app(service)) as where:
        yield where


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    tab = browser.new_page(viewport={"width": 1200, "height": 900})
    wrong = []
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((address, "data:", "blob:")) else None)
    tab.goto(address)
    yield tab
    tab.close()
    assert wrong == []


def log_in(page, secret=USER):
    page.fill("#key", secret)
    page.press("#key", "Tab")
    page.wait_for_function("document.getElementById('who').textContent.includes('(')")


def draw(page, prompt="a person on the beach", seed="1"):
    page.fill("#prompt", prompt)
    page.fill("#seed", seed)
    page.press("#prompt", "Enter")
    page.wait_for_function(
        "!document.getElementById('go').disabled && document.getElementById('verdict').textContent", timeout=60000
    )


def test_a_picture_is_drawn_watched_and_told(page):
    log_in(page)
    draw(page)
    assert page.locator("#strip img").count() == 4
    assert "blurred" in page.locator("#strip img").first.get_attribute("alt")
    assert page.locator("#curve svg circle").count() >= 1
    assert page.locator("#verdict").inner_text()
    shot = Path("out") / "page"
    shot.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=shot / "draw.png", full_page=True)


def test_a_wrong_key_is_told(page):
    page.fill("#key", "wrong")
    page.press("#key", "Tab")
    page.wait_for_function("document.getElementById('who').textContent.includes('API key')")


def test_history_remembers(page):
    log_in(page)
    draw(page, "a hat")
    page.click("[data-tab=history]")
    assert "a hat" in page.locator("#runs").inner_text()


def test_an_upload_is_audited(page, tmp_path):
    log_in(page)
    picture = Image.new("RGB", (64, 64), (120, 120, 120))
    picture.paste((255, 255, 255), (0, 0, 64, 40))
    picture.save(tmp_path / "a.png")
    page.click("[data-tab=audit]")
    page.set_input_files("#file", str(tmp_path / "a.png"))
    page.click("#upload button")
    page.wait_for_selector("#audited .verdict")
    assert "nudity" in page.locator("#audited .verdict").inner_text()


def test_operators_change_the_policy_and_users_do_not(page):
    log_in(page)
    page.click("[data-tab=policy]")
    page.wait_for_function("document.getElementById('limits').textContent.includes('operators')")
    log_in(page, OPERATOR)
    page.click("[data-tab=draw]")
    page.click("[data-tab=policy]")
    page.wait_for_selector("#limits input")
    page.locator("#limits input").first.fill("0.5")
    page.click("#save")
    page.wait_for_function("document.getElementById('saved').textContent === 'saved'")
    assert '"trigger": 0.5' in page.locator("#rules").input_value()


def test_metrics_are_drawn(page):
    log_in(page)
    draw(page)
    page.click("[data-tab=metrics]")
    page.wait_for_selector("#charts .bar")
    assert "Pictures by outcome" in page.locator("#charts").inner_text()


def test_the_keyboard_is_enough(page):
    log_in(page)
    page.focus("[data-tab=draw]")
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-panel=audit]").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-panel=draw]").is_visible()
