"""The labelling page in real Chromium: the keyboard labels, a stopped session goes on, two labellers are compared."""

from __future__ import annotations

import shutil
import time

import pytest
from label_pages import POLICY, grey_pictures
from label_pages import label_page_of as page

from guardpaint.data import hand_labels

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is tested in a real Chromium: install one (package chromium) to run this"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def pictures(tmp_path):
    return grey_pictures(tmp_path / "pictures")


@pytest.fixture
def tab(browser):
    opened, wrong = browser.new_page(), []
    opened.on("pageerror", lambda e: wrong.append(str(e)))
    opened.on("request", lambda r: wrong.append(r.url) if not r.url.startswith("http://127.0.0.1:") else None)
    yield opened
    opened.close()
    assert wrong == []


def wait_for(tab, text, seconds=20):
    """Wait until the line above the bar begins with a text."""
    end = time.monotonic() + seconds
    while not (said := tab.locator("#n").inner_text()).startswith(text):
        assert time.monotonic() < end, said
        tab.wait_for_timeout(30)


def press(tab, *keys):
    """Press keys that label, and wait until each label is stored."""
    for key in keys:
        done = int(tab.locator("#n").inner_text().split()[0])
        tab.keyboard.press(key)
        wait_for(tab, f"{done + 1} of")


def own(out, who):
    return {x.key: x for x in hand_labels.read_labels(out, POLICY) if x.labeller == who}


def test_the_keyboard_labels_and_a_stopped_session_goes_on(tab, pictures, tmp_path):
    out = tmp_path / "l.jsonl"
    with page(pictures, out, cases=("swimwear", "crowd")) as address:
        tab.goto(address)
        wait_for(tab, "0 of 6 labelled, this is 1")
        tab.wait_for_function("document.getElementById('shown').naturalWidth === 40")
        first = tab.locator("#shown").get_attribute("data-key")
        assert "bikinis" in tab.locator("aside").inner_text()
        tab.keyboard.press("w")
        press(tab, "0", "1", "u")
        wait_for(tab, "3 of 6 labelled, this is 4")
        tab.keyboard.press("b")
        assert "blurred" in tab.locator("#shown").get_attribute("class")
    labels = own(out, "ann")
    assert labels[first].label == "safe" and labels[first].case == "crowd" and labels[first].seconds > 0
    assert sorted(x.label for x in labels.values()) == ["nudity", "safe", "unsure"]
    with page(pictures, out, cases=("swimwear", "crowd")) as address:
        tab.goto(address)
        wait_for(tab, "3 of 6 labelled, this is 4")
        tab.keyboard.press("ArrowLeft")
        wait_for(tab, "3 of 6 labelled, this is 3")
        assert "chosen" in tab.locator("[data-label=unsure]").get_attribute("class")
        tab.keyboard.press("2")  # the labeller thinks again
        wait_for(tab, "3 of 6 labelled, this is 4")
        press(tab, "2", "2", "2")
    assert len(own(out, "ann")) == 6 and "unsure" not in {x.label for x in own(out, "ann").values()}


def test_two_labellers_see_how_far_they_agree(tab, pictures, tmp_path):
    """The second sees pictures in another order, and never what the first said."""
    out = tmp_path / "l.jsonl"
    with page(pictures, out, "ann") as address:
        tab.goto(address)
        wait_for(tab, "0 of 6")
        press(tab, *"001122")
    with page(pictures, out, "bob") as address:
        tab.goto(address)
        wait_for(tab, "0 of 6")
        assert tab.locator("#said").inner_text() == ""
        for _ in range(6):
            said = own(out, "ann")[tab.locator("#shown").get_attribute("data-key")].label
            press(tab, str(POLICY.names.index(said)))
        tab.wait_for_timeout(50)
        assert "6 of 6 pictures alike, κ 1.00" in tab.locator("#agreement").inner_text()


def test_several_categories_are_chosen_and_saved_with_enter(tab, pictures, tmp_path):
    out = tmp_path / "l.jsonl"
    with page(pictures, out, several=True) as address:
        tab.goto(address)
        wait_for(tab, "0 of 6")
        tab.keyboard.press("1")
        tab.keyboard.press("2")
        assert tab.locator("button.chosen").count() == 2
        press(tab, "Enter", "0")
        tab.keyboard.press("Enter")  # nothing is chosen, nothing is saved
        tab.wait_for_timeout(100)
    assert sorted(x.label for x in own(out, "ann").values()) == ["nudity+violence", "safe"]


def test_a_label_that_cannot_be_written_is_said(tab, pictures, tmp_path):
    out = tmp_path / "gone" / "l.jsonl"
    with page(pictures, out) as address:
        tab.goto(address)
        wait_for(tab, "0 of 6")
        out.parent.write_text("a file where the folder should be")
        tab.keyboard.press("0")
        tab.wait_for_function("document.getElementById('problem').textContent.startsWith('not saved')")
        wait_for(tab, "0 of 6 labelled, this is 1")
        out.parent.unlink()
        press(tab, "0")
    assert len(own(out, "ann")) == 1
