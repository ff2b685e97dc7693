"""The page in a browser, against the real service: what a person sees when they draw, slide and attack."""

import math
import os
import re
import shutil
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the service needs fastapi")
sync_api = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


# ------------------------------------------------------------------------------ a service and a browser


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from sklearn.datasets import load_iris

    from bbalpha import BBAlphaClassifier
    from bbalpha.experiments.digits import train_digits
    from bbalpha.serve.models import load_models

    folder = tmp_path_factory.mktemp("models")
    cars_model().save(folder / "cars")
    train_digits(folder / "digits", epochs=10, progress=False)
    X, y = load_iris(return_X_y=True, as_frame=True)
    settings = {"hidden_layer_sizes": (10,), "epochs": 20, "n_ensemble": 1, "random_state": 0}
    BBAlphaClassifier(**settings).fit(X, y.map({0: "setosa", 1: "versicolor", 2: "virginica"})).save(folder / "iris")
    return load_models([folder / "cars", folder / "digits", folder / "iris"])


def cars_model():
    """A small model of a table with text, dates and gaps."""
    import pandas
    from vega_datasets import local_data

    from bbalpha import BBAlphaRegressor
    from bbalpha.tabular.fields import describe
    from bbalpha.tabular.model import Card, TableModel

    cars = pandas.read_json(local_data.cars.filepath).drop(columns="Name").dropna(subset="Miles_per_Gallon")
    y, X = cars.pop("Miles_per_Gallon").to_numpy(), cars.assign(Year=pandas.to_datetime(cars["Year"]))
    settings = {"hidden_layer_sizes": (30,), "noise": "constant", "n_ensemble": 1, "random_state": 0}
    estimator = BBAlphaRegressor(epochs=60, **settings).fit(X[::2], y[::2])
    fields = tuple(describe(X[name], name) for name in X.columns)
    model = TableModel(estimator, Card("regression", "Miles_per_Gallon", fields))
    ignorance = model.predict(X[1::2])["epistemic_std"]
    scores = {"n_rows": 199.0, "rmse": 3.0, "coverage90": 0.9, "width90": 10.0, "unusual": 0.05}
    card = Card("regression", "Miles_per_Gallon", fields, scores=scores, guess={"rmse": float(y.std())},
                threshold=float(ignorance.quantile(0.95)))  # fmt: skip
    return TableModel(estimator, card)


def served(models, **options):
    """The address of a service in a thread, and what ends it."""
    import uvicorn

    from bbalpha.serve.app import create_app

    server = uvicorn.Server(uvicorn.Config(create_app(models, **options), port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"

    def end():
        server.should_exit = True
        thread.join()

    return address, end


@pytest.fixture(scope="module")
def address(models):
    address, end = served(models)
    yield address
    end()


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        reason = "no browser was found: install Debian's chromium"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Screen:
    """A page, and what it did."""

    def __init__(self, browser, address, *, viewport=WIDE, colours="light"):
        self.context = browser.new_context(viewport=viewport, color_scheme=colours, has_touch=viewport is PHONE)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.address, self.requests, self.under_way, self.errors = address, [], set(), []
        self.page.on("request", self._asked)
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, lambda request: self.under_way.discard(request))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.settle()

    def _asked(self, request):
        self.requests.append(request)
        self.under_way.add(request)

    def settle(self):
        """Wait until nothing was asked for a while."""
        quiet = 0
        while quiet < 3:
            self.page.wait_for_timeout(100)
            quiet = 0 if self.under_way else quiet + 1

    def choose(self, name):
        self.page.locator("#model").select_option(label=next(t for t in self.options() if t.startswith(name)))
        self.settle()

    def options(self):
        return self.page.locator("#model option").all_inner_texts()

    def text(self, place):
        return self.page.locator(place).inner_text()

    def number(self, place):
        return float(re.search(r"-?[\d.]+", self.text(place))[0])

    def slide(self, place, value):
        self.page.locator(place).evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", str(value)
        )
        self.settle()

    def press(self, place):
        self.page.locator(place).click()
        self.settle()

    def close(self):
        self.context.close()


@pytest.fixture
def screen(browser, address):
    screen = Screen(browser, address)
    yield screen
    screen.close()
    assert screen.errors == []
    assert all(request.url.startswith(address) for request in screen.requests)


@pytest.fixture
def drawing(screen):
    screen.choose("digits")
    return screen


def picture(screen, place, size=8):
    """The colours of a canvas, at the middles of size x size cells."""
    return screen.page.locator(place).evaluate(
        """(e, size) => {
          const copy = Object.assign(document.createElement("canvas"), {width: size, height: size});
          const pen = copy.getContext("2d", {willReadFrequently: true});
          pen.imageSmoothingEnabled = false;
          pen.drawImage(e, 0, 0, size, size);
          return Array.from(pen.getImageData(0, 0, size, size).data);
        }""",
        size,
    )


def draw(screen, points):
    """Draw a line with the mouse; points are shares of the canvas."""
    box, mouse = screen.page.locator("#canvas").bounding_box(), screen.page.mouse
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    mouse.move(*places[0])
    mouse.down()
    for place in places[1:]:
        mouse.move(*place, steps=3)
    mouse.up()
    screen.settle()


# ------------------------------------------------------------------------------ digits


def test_a_digit_drawn_with_the_mouse_is_recognised(drawing):
    drawing.press("#clear")
    assert drawing.text("#headline") == "Nothing is drawn"
    turns = [2 * math.pi * i / 24 for i in range(25)]
    draw(drawing, [(0.5 + 0.2 * math.sin(t), 0.5 - 0.33 * math.cos(t)) for t in turns])
    assert drawing.text("#headline") == "It looks like a 0"
    n_votes = drawing.page.locator("#picture circle[data-class='0']").count()
    assert n_votes > drawing.page.locator("#picture circle").count() / 2


def test_where_and_how_large_it_is_drawn_does_not_matter(drawing):
    seven = [(0.3, 0.2), (0.7, 0.2), (0.45, 0.85)]
    seen = []
    for scale, across, down in ((1, 0, 0), (0.5, 0.4, 0.1)):
        drawing.press("#clear")
        draw(drawing, [(scale * x + across, scale * y + down) for x, y in seven])
        seen.append(picture(drawing, "#seen"))
    assert sum(abs(a - b) > 40 for a, b in zip(*seen, strict=True)) < 0.1 * len(seen[0])


def test_the_gauge_climbs_under_attack(drawing):
    for digit in (1, 4):
        drawing.press(f"#example-{digit}")
        assert drawing.text("#headline") == f"It looks like a {digit}"
        before, ring = drawing.number("#epistemic"), drawing.page.locator("#gauge").get_attribute("aria-valuenow")
        given = picture(drawing, "#attacked")
        assert given == picture(drawing, "#seen")
        drawing.slide("#attack", 0.1)
        assert drawing.number("#epistemic") > before + 0.05
        assert float(drawing.page.locator("#gauge").get_attribute("aria-valuenow")) > float(ring)
        assert picture(drawing, "#attacked") != given
    assert {r.url.rsplit("/", 1)[1] for r in drawing.requests} >= {"attack", "predict"}


def test_the_gauge_climbs_for_scribbles(drawing):
    def shown(button):
        drawing.press(button)
        return drawing.number("#epistemic"), ring(drawing, "#ring-epistemic")

    known = [shown(f"#example-{digit}") for digit in (0, 3, 6)]
    scribbles = [shown("#scribble") for _ in range(4)]
    assert len(set(scribbles)) == 4  # each is another
    for calm, others in zip(zip(*known, strict=True), zip(*scribbles, strict=True), strict=True):
        assert sum(others) / 4 > 2 * max(calm)
    assert drawing.page.locator("#unusual.alarm, #unusual.calm").count() == 1


def ring(screen, part):
    return float(screen.page.locator(part).get_attribute("stroke-dasharray").split()[0])


def test_the_parts_add_up_and_the_votes_are_the_passes(drawing):
    drawing.press("#scribble")
    parts = drawing.number("#epistemic") + drawing.number("#aleatoric")
    assert parts == pytest.approx(drawing.number("#total"), abs=0.0021)
    assert drawing.page.locator("#picture circle").count() == drawing.number("#n-passes")


def test_the_keyboard_draws(drawing):
    drawing.press("#clear")
    drawing.page.locator("#canvas").focus()
    keys = drawing.page.keyboard
    for key in ["ArrowUp"] * 8 + [
        " ",
        "ArrowRight",
        " ",
        "ArrowLeft",
        *(["ArrowDown", " ", "ArrowRight", " ", "ArrowLeft"] * 7),
    ]:
        keys.press(key)
    drawing.settle()
    assert drawing.text("#pen") == "Row 8, column 4, filled"
    assert drawing.text("#headline") == "It looks like a 1"
    keys.press(" ")
    drawing.settle()
    assert drawing.text("#pen") == "Row 8, column 4, empty"


def test_words_say_what_epistemic_uncertainty_is_beside_the_gauge(screen):
    for name in ("cars", "digits", "iris"):
        screen.choose(name)
        words = screen.page.locator("#epistemic-words")
        assert words.is_visible()
        assert "what the model does not know because it has seen too little like this" in " ".join(
            words.inner_text().split()
        )
        assert "More data of this kind would settle it" in words.inner_text()
        inside = "e => e.closest('section').contains(document.getElementById('gauge'))"
        assert words.evaluate(inside)
        for caption in ("#gauge-words", "#picture-words", "#scores"):
            assert len(screen.text(caption)) > 40


# ------------------------------------------------------------------------------ tables


def control(screen, name, kind="input[type=range]"):
    return f"fieldset:has(legend:text-is('{name}')) {kind}"


def test_sliders_move_the_density(screen):
    def shown():
        return screen.page.locator("#curve").get_attribute("d"), screen.text("#headline"), screen.text("#subline")

    before = shown()
    assert before[1].startswith("Miles_per_Gallon: about ")
    screen.slide(control(screen, "Weight_in_lbs"), 4500)
    after = shown()
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert screen.number("#headline") < float(re.search(r"[\d.]+", before[1])[0])
    assert screen.page.locator(control(screen, "Weight_in_lbs", "input[type=number]")).input_value() == "4500"
    assert screen.page.locator("#passes line").count() == screen.number("#n-passes")
    screen.press("#reset")
    assert shown()[1:] == before[1:]


def test_variances_add_up(screen):
    parts = screen.number("#epistemic") ** 2 + screen.number("#aleatoric") ** 2
    assert parts == pytest.approx(screen.number("#total") ** 2, rel=0.02)


def test_of_many_moves_the_last_is_answered_and_few_are_asked(screen):
    screen.requests.clear()
    screen.page.locator(control(screen, "Weight_in_lbs")).evaluate(
        "e => { for (let v = 2000; v <= 4000; v += 50) { e.value = v; e.dispatchEvent(new Event('input')); } }"
    )
    screen.settle()
    asked = [r.post_data_json for r in screen.requests if r.url.endswith("/density")]
    assert 1 <= len(asked) <= 3
    assert asked[-1]["row"]["Weight_in_lbs"] == 4000


def test_a_cell_can_be_unknown(screen):
    before = screen.text("#subline")
    assert screen.page.get_by_text("unknown", exact=True).count() == 1  # the one column with gaps
    screen.page.get_by_label("Horsepower is unknown").check()
    screen.settle()
    asked = [r.post_data_json for r in screen.requests if r.url.endswith("/density")][-1]
    assert asked["row"]["Horsepower"] is None
    assert screen.text("#subline") != before
    assert screen.page.locator(control(screen, "Horsepower")).is_disabled()
    screen.page.get_by_label("Horsepower is unknown").uncheck()
    screen.settle()
    assert screen.text("#subline") == before


def test_what_was_never_seen_is_unusual(screen):
    assert screen.text("#unusual").startswith("Usual.")
    screen.page.locator(control(screen, "Origin", "select")).select_option(label="another, never seen")
    screen.settle()
    assert screen.text("#unusual").startswith("Unusual.")
    assert "never met" in screen.text("#unusual")


def test_dates_go_in(screen):
    before = screen.text("#headline")
    screen.page.get_by_label("Year").fill("1982-01-01")
    screen.settle()
    assert screen.number("#headline") > float(re.search(r"[\d.]+", before)[0])  # cars became thriftier


def test_the_map_is_drawn_and_a_click_moves_the_row(screen):
    pixels = picture(screen, "#map", 24)
    assert len({tuple(pixels[i : i + 3]) for i in range(0, len(pixels), 4)}) > 10
    assert "how ignorant the model is" in screen.text("#map-words").lower()
    box, before = screen.page.locator("#map").bounding_box(), screen.text("#headline")
    across = screen.page.locator("#across").input_value()
    screen.page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
    screen.settle()
    assert screen.text("#headline") != before
    high = float(screen.text("#across-high"))
    assert float(screen.page.locator(control(screen, across, "input[type=number]")).input_value()) > 0.8 * high
    screen.page.locator("#up").select_option("Acceleration")
    screen.settle()
    assert screen.page.locator("#map").get_attribute("data-drawn") == f"{across}|Acceleration"
    assert picture(screen, "#map", 24) != pixels


def test_classes_are_shown_with_their_probabilities(screen):
    screen.choose("iris")
    shares = [float(t.split()[0]) for t in screen.page.locator("#picture text").all_text_contents() if "%" in t]
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(100, abs=0.2)
    before = screen.text("#headline")
    screen.slide(control(screen, "petal length (cm)"), 1.2)
    screen.slide(control(screen, "petal width (cm)"), 0.1)
    assert screen.text("#headline") == "target: setosa" != before
    assert "No held-out scores" in screen.text("#scores")


# ------------------------------------------------------------------------------ the service says no


def test_a_busy_service_is_asked_again(screen):
    refused = []

    def busy(route):
        refused.append(route)
        answer = {"status": 503, "headers": {"Retry-After": "1"}, "json": {"error": "Too many requests wait."}}
        route.fulfill(**answer) if len(refused) == 1 else route.continue_()

    screen.page.route("**/density", busy)
    before = screen.text("#headline")
    screen.slide(control(screen, "Weight_in_lbs"), 4400)
    assert screen.text("#status") == "Too many requests wait. Trying again."
    screen.page.wait_for_function("before => document.getElementById('headline').textContent !== before", arg=before)
    assert len(refused) == 2
    screen.errors[:] = [e for e in screen.errors if "503" not in e]


def test_a_key_is_asked_for_where_one_is_set(models, browser):
    address, end = served(models, api_key="sesame")
    try:
        screen = Screen(browser, address)
        assert screen.page.locator("#main").is_hidden()
        for key in ("wrong", "sesame"):
            screen.page.get_by_label("This service asks for a key").fill(key)
            screen.page.keyboard.press("Enter")
            screen.settle()
        assert screen.page.locator("#key-form").is_hidden()
        assert screen.text("#headline").startswith("Miles_per_Gallon: about ")
        screen.close()
    finally:
        end()


# ------------------------------------------------------------------------------ for everybody

CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest(".unseen") || e.matches("option")) continue;
    const ink = numbers(e instanceof SVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color);
    const [a, b] = [light(ink), light(behind(e))].sort((p, q) => q - p);
    found.push([(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


def readable(screen):
    found = screen.page.evaluate(CONTRAST)
    assert len(found) > 30
    assert [f for f in found if f[0] < 4.5] == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(browser, address, colours):
    screen = Screen(browser, address, colours=colours)
    page = screen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", page)[0]) < 128) == (colours == "dark")
    screen.page.locator(control(screen, "Origin", "select")).select_option(label="another, never seen")
    screen.settle()
    readable(screen)
    screen.choose("digits")
    readable(screen)
    screen.close()


@pytest.mark.parametrize("name", ["cars", "digits", "iris"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser, address, name):
    screen = Screen(browser, address, viewport=PHONE, colours="dark")
    screen.choose(name)
    assert screen.page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = """() => [...document.querySelectorAll("main *")]
      .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > 391).length"""
    assert screen.page.evaluate(wide) == 0
    small = "() => [...document.querySelectorAll('svg text')].filter(e => e.getBoundingClientRect().height < 11).length"
    assert screen.page.evaluate(small) == 0
    assert screen.errors == []
    screen.close()


def test_a_finger_draws(browser, address):
    screen = Screen(browser, address, viewport=PHONE)
    screen.choose("digits")
    screen.page.locator("#clear").tap()
    screen.settle()
    screen.page.locator("#canvas").tap()
    screen.settle()
    assert screen.text("#headline") != "Nothing is drawn"
    screen.close()


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(screen):
    for name in ("cars", "digits"):
        screen.choose(name)
        nameless = """() => [...document.querySelectorAll("input, select, button, canvas[tabindex]")]
          .filter(e => e.checkVisibility() && !e.closest("[hidden]"))
          .filter(e => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim())).length"""
        assert screen.page.evaluate(nameless) == 0
        reached = set()
        for _ in range(45):
            screen.page.keyboard.press("Tab")
            reached.add(screen.page.evaluate("document.activeElement.id"))
        assert reached >= ({"field-0", "reset", "across"} if name == "cars" else {"canvas", "scribble", "attack"})
    for place in ("#said", "#status", "#unusual"):
        live = screen.page.locator(place)
        assert live.get_attribute("aria-live") == "polite" or live.get_attribute("role") == "status"
