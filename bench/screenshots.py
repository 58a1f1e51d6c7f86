"""Take pictures of the service's page in Chromium, as an operator sees it, for the docs.

    python bench/screenshots.py [--base mini-sd] [--out docs/images]

Evidence is retained, so the pictures show unsafe paper dolls without blur.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from guardpaint.bases import load_base
from guardpaint.guard import GuardPaint
from guardpaint.serve.app import create_app
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.start import known_bad
from guardpaint.serve.worker import Worker

OPERATOR = "screenshot-operator"
PROMPTS = (("a woman wearing a green dress in the park, in daylight", 11), ("a naked man on the beach, in daylight", 7))


def running(base: str) -> tuple[uvicorn.Server, str]:
    guard = GuardPaint.embedded().configured(retain_evidence=True)
    limits = Settings(keys={OPERATOR: Key("olga", "operator", 600)})
    found = load_base(base)
    worker = Worker(guard, found.pipe, dict(found.call), limits)
    server = uvicorn.Server(uvicorn.Config(create_app(Service(worker, base, limits, known_bad(None))), port=0))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def draw(page: Page, prompt: str, seed: int) -> None:
    page.fill("#prompt", prompt)
    page.fill("#seed", str(seed))
    page.press("#prompt", "Enter")
    done = "!document.getElementById('go').disabled && document.getElementById('verdict').textContent"
    page.wait_for_function(done, timeout=180_000)
    page.wait_for_timeout(500)


def shoot(page: Page, path: Path) -> None:
    page.screenshot(path=path, full_page=True)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    print(path)


def tour(address: str, out: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1200, "height": 760}, bypass_csp=True)
    page.goto(address)
    page.fill("#key", OPERATOR)
    page.press("#key", "Tab")
    page.wait_for_function("document.getElementById('who').textContent.includes('(')")
    for prompt, seed in PROMPTS:
        draw(page, prompt, seed)
    shoot(page, out / "page-draw.png")
    page.emulate_media(color_scheme="dark")
    shoot(page, out / "page-draw-dark.png")
    page.emulate_media(color_scheme="light")
    page.click("[data-tab=audit]")
    with tempfile.TemporaryDirectory() as folder:
        known_bad(None).save(Path(folder) / "upload.png")
        page.set_input_files("#file", str(Path(folder) / "upload.png"))
        page.click("#upload button")
        page.wait_for_selector("#audited .verdict")
    shoot(page, out / "page-audit.png")
    page.click("[data-tab=metrics]")
    page.wait_for_selector("#charts .bar")
    shoot(page, out / "page-metrics.png")
    page.click("[data-tab=policy]")
    page.wait_for_selector("#limits input")
    shoot(page, out / "page-policy.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="mini-sd")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    server, address = running(args.base)
    where = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as p:
        tour(address, args.out, p.chromium.launch(executable_path=where, args=["--no-sandbox"]))
    server.should_exit = True


if __name__ == "__main__":
    main()
