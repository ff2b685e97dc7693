"""A frozen network in a real browser: what onnxruntime-web gives there is what torch gives here."""

import functools
import http.server
import importlib.util
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

import bbalpha

pytest.importorskip("onnxscript", reason="ONNX files are written by onnxscript")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript", "ignore::UserWarning:torch.onnx"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@pytest.fixture(scope="module")
def modules():
    """Where npm has put onnxruntime-web: beside the page, or where BBALPHA_NODE_MODULES says."""
    path = Path(os.environ.get("BBALPHA_NODE_MODULES", EXAMPLE / "node_modules"))
    if not (path / "onnxruntime-web").is_dir():
        pytest.skip("onnxruntime-web is not installed: npm install --prefix examples/browser")
    return path


@pytest.fixture(scope="module")
def site(modules, tmp_path_factory):
    """The address of the page, and the network that was frozen for it."""
    spec = importlib.util.spec_from_file_location("browser_build", EXAMPLE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path_factory.mktemp("site")
    net = module.build(out, epochs=5, modules=modules)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(out)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", net
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def page(site):
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser was found: install Debian's chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.problems, page.asked = [], []
        page.on("console", lambda m: page.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(site[0])
        page.locator("#status", has_text="ready").wait_for()
        yield page
        browser.close()


def test_probabilities_in_the_browser_are_those_of_torch(site, page):
    x = torch.rand(7, 64)
    found = page.evaluate("rows => window.predict(rows)", x.tolist())
    p = bbalpha.predict_classification(site[1], x, n_passes=20, masks="shared", seed=0)
    torch.testing.assert_close(torch.tensor([f["probs"] for f in found]), p.probs, rtol=1e-4, atol=1e-4)
    for name in ("entropy", "mutual_information"):
        torch.testing.assert_close(torch.tensor([f[name] for f in found]), getattr(p, name), rtol=1e-4, atol=1e-4)


def test_the_page_reads_digits_and_wonders_at_scribbles(page):
    known = []
    for digit in (0, 1, 6):
        page.locator("#examples button", has_text=str(digit)).click()
        page.locator("#headline", has_text=f"It looks like a {digit}").wait_for()
        known.append(float(page.locator("#information").inner_text()))
    strange = []
    for _ in range(3):
        before = page.locator("#information").inner_text()
        page.locator("#scribble").click()
        page.wait_for_function("b => document.getElementById('information').textContent !== b", arg=before)
        strange.append(float(page.locator("#information").inner_text()))
    assert sum(strange) > 2 * sum(known)
    page.locator("#clear").click()
    page.locator("#headline", has_text="Nothing is drawn").wait_for()


def test_everything_comes_from_the_server_of_files(site, page):
    assert page.problems == []
    assert {url for url in page.asked if not url.startswith(("data:", "blob:"))} == {
        url for url in page.asked if url.startswith(site[0])
    }
