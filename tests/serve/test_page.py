"""The page in real Chromium: draw, watch, read the story, audit an upload, change the policy."""

from __future__ import annotations

import shutil
import time
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
    tab.on("console", lambda m: wrong.append(m.text) if "Content Security Policy" in m.text else None)
    tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((address, "data:", "blob:")) else None)
    tab.goto(address)
    yield tab
    tab.close()
    assert wrong == []


def wait_for(page, condition, seconds=30):
    """Wait until a condition holds. Playwright's own wait evaluates a string, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def log_in(page, secret=USER):
    page.fill("#key", secret)
    page.press("#key", "Tab")
    wait_for(page, "document.getElementById('who').textContent.includes('(')")


def draw(page, prompt="a person on the beach", seed="1"):
    page.fill("#prompt", prompt)
    page.fill("#seed", seed)
    page.press("#prompt", "Enter")
    wait_for(page, "!document.getElementById('go').disabled && document.getElementById('verdict').textContent", 60)


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
    wait_for(page, "document.getElementById('who').textContent.includes('API key')")


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
    wait_for(page, "document.getElementById('limits').textContent.includes('operators')")
    log_in(page, OPERATOR)
    page.click("[data-tab=draw]")
    page.click("[data-tab=policy]")
    page.wait_for_selector("#limits input")
    page.locator("#limits input").first.fill("0.5")
    page.click("#save")
    wait_for(page, "document.getElementById('saved').textContent === 'saved'")
    assert '"trigger": 0.5' in page.locator("#rules").input_value()


def test_metrics_are_drawn_for_operators(page):
    log_in(page)
    draw(page)
    page.click("[data-tab=metrics]")
    wait_for(page, "document.getElementById('charts').textContent.includes('operators')")
    log_in(page, OPERATOR)
    page.click("[data-tab=draw]")
    page.click("[data-tab=metrics]")
    page.wait_for_selector("#charts .bar")
    assert "Pictures by outcome" in page.locator("#charts").inner_text()


def test_a_report_page_keeps_to_its_policy(page, address):
    """Its styles and pictures are shown under the headers that it is sent with."""
    log_in(page, OPERATOR)
    draw(page)
    page.evaluate("""async () => {
        const run = JSON.parse(localStorage.getItem('runs'))[0];
        const r = await api('/v1/reports/' + run.report + '?html=true');
        window.policy = (await fetch('/v1/reports/' + run.report + '?html=true', {headers: headers()})).headers.get('content-security-policy');
        window.report = r;
    }""")
    text, policy = page.evaluate("window.report"), page.evaluate("window.policy")
    page.route(
        "**/shown",
        lambda route: route.fulfill(
            body=text, headers={"content-security-policy": policy, "content-type": "text/html"}
        ),
    )
    page.goto(address + "/shown")
    assert page.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
    assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0)")


def test_scripts_that_are_not_the_pages_own_do_not_run(browser, address):
    tab = browser.new_page()
    tab.goto(address)
    tab.evaluate("""() => {
        const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.ran = 2">');
    }""")
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.ran") is None
    tab.close()


def test_the_keyboard_is_enough(page):
    log_in(page)
    page.focus("[data-tab=draw]")
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-panel=audit]").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.locator("[data-panel=draw]").is_visible()
