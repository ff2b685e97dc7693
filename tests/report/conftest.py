"""Small models with cards, and a reader of pages that is strict about them."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas
import pytest
from markupsafe import Markup

from bbalpha import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.report import judging, paper_attacks, paper_digits, paper_tables
from bbalpha.tabular.fields import describe
from bbalpha.tabular.fitting import _judged
from bbalpha.tabular.model import Card, TableModel

VOID = {"meta", "br", "link", "img", "input", "hr"}
NAMES = ["size", "town", "<script>alert(1)</script>"]


class Reader(HTMLParser):
    """Reads a page; every tag must be closed, every id must be the only one of its name."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.html, self.open, self.ids, self.tags, self.text = html, [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == [], f"left open: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "two things have one id"

    def handle_starttag(self, tag, attrs):
        self._seen(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._seen(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text += data

    def _seen(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])

    def plain(self):
        """The text, blanks made one."""
        return " ".join(self.text.split())

    def pictures(self):
        return [attrs for tag, attrs in self.tags if tag == "svg"]


@pytest.fixture(scope="session")
def read():
    """Reads a page, and sees that it stands by itself."""

    def read(html):
        page = Reader(html)
        for tag, attrs in page.tags:
            assert tag not in ("script", "iframe", "link", "object", "img")
            assert not any(name.startswith("on") for name in attrs)
            for name, value in attrs.items():
                if name in ("src", "href", "xlink:href", "action", "data"):
                    assert value.startswith("#"), f"{tag} loads {value}"
                    assert value[1:] in page.ids, f"{value} is nowhere"
                for place in re.findall(r"url\((.*?)\)", value or ""):
                    assert place[1:] in page.ids, f"{place} is nowhere"
        assert "@import" not in html
        assert not re.search(r"url\(\s*['\"]?(?!#)", html)
        assert dict(page.tags)["html"]["lang"] == "en"
        assert re.search(r"<title>[^<]+</title>", html)
        assert all(p["role"] == "img" and p["aria-label"] for p in page.pictures())
        assert len(html) < 1_000_000
        return page

    return read


@pytest.fixture
def words_only(monkeypatch):
    """Pictures are left empty where a test is about words: drawing takes most of the time."""

    def empty(figure, *, name, alt):
        return Markup('<svg role="img" aria-label="{}" id="{}"></svg>').format(alt, name)

    for module in (judging, paper_attacks, paper_digits, paper_tables):
        monkeypatch.setattr(module, "inline", empty)


def table(n, seed):
    rng = np.random.default_rng(seed)
    size, odd = rng.normal(size=n), rng.normal(size=n)
    town = rng.choice(["Rome", "<b>Bern</b>"], n)
    frame = pandas.DataFrame({"size": size, "town": town, NAMES[2]: odd})
    return frame, 3 * size + (town == "Rome") + 0.5 * rng.normal(size=n)


def made(task, n=400, held=120):
    frame, y = table(n, 0)
    settings = {"hidden_layer_sizes": (10,), "epochs": 20, "n_ensemble": 1, "random_state": 0, "n_predict_passes": 20}
    if task == "regression":
        estimator = BBAlphaRegressor(noise="constant", **settings)
    else:
        y = np.where(y > 1, "high & <dry>", "low").astype(object).astype(str)
        estimator = BBAlphaClassifier(**settings)
    inside, outside = frame.iloc[held:], frame.iloc[:held]
    estimator.fit(inside, y[held:])
    card = Card(
        task, "price <i>", tuple(describe(inside[name], name) for name in frame), {"id & name": "identifiers"},
        n - held, held, "chosen at random",
        candidates=({"candidate": "10 <relu>", "nll": 1.25, "final_nll": None, "weight": 1.0},),
        facts={"file": "houses & co.csv", "seed": 7, "seconds": 1.5, "versions": {"torch": "2.13"}},
    )  # fmt: skip
    return _judged(TableModel(estimator, card), outside, y[:held], y[held:])


@pytest.fixture(scope="session")
def regression():
    return made("regression")


@pytest.fixture(scope="session")
def classification():
    return made("classification")


@pytest.fixture(scope="session")
def fresh():
    """Rows with targets that no model has seen."""
    frame, y = table(150, 1)
    return frame, y
