"""Pictures of the docs: ``python docs/pictures.py [FOLDER]`` makes them, with chromium and Ray."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from terminal import record, svg

from rl_eval import EvalConfig, evaluate
from rl_eval.reports.html import Source, render

ROOT = Path(__file__).parents[1]
PICTURES = {"light": "report.webp", "dark": "report_dark.webp"}
WIDTH, HEIGHT = 1160, 780
"""Pixels of the page that are shown: its head, and the first charts."""

COMMAND = "rl-eval run --env CartPole-v1 --policy random -n 100"
COMMANDS = (COMMAND, f"{COMMAND} --runners 2 | grep fingerprint")
TITLE = "A terminal: an evaluation in one process, and again on two Ray actors; the fingerprints are the same"


def make_animation(folder: Path) -> None:
    """Record a terminal in which two commands run."""
    with tempfile.TemporaryDirectory() as work:
        (folder / "terminal.svg").write_text(svg(TITLE, record(COMMANDS, Path(work))), encoding="utf-8")


def make_pictures(folder: Path) -> None:
    """Evaluate the policy of ``configs/cartpole.yaml``, and take pictures of the report."""
    config = EvalConfig.from_yaml(ROOT / "configs" / "cartpole.yaml").runners(num_runners=0)
    text = render([Source("runs/cartpole", evaluate(config))])
    with tempfile.TemporaryDirectory() as work, sync_playwright() as started:
        page = Path(work, "report.html")
        page.write_text(text, encoding="utf-8")
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        for scheme, name in PICTURES.items():
            _take(browser, page, scheme).save(folder / name, quality=82, method=6)
        browser.close()


def _take(browser: Browser, page: Path, scheme: str) -> Image.Image:
    size = {"width": WIDTH, "height": HEIGHT}
    opened = browser.new_page(viewport=size, device_scale_factor=1.5, color_scheme=scheme)
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    return Image.open(io.BytesIO(opened.screenshot()))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    make_pictures(target)
    make_animation(target)
