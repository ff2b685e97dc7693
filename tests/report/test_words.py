import math

import numpy as np
import pytest

from bbalpha.report.words import ENOUGH, Gain, Share, listed, number, percent


def hits(n, right):
    return np.arange(n) < right


@pytest.mark.parametrize(("right", "word"), [(90, "as promised"), (85, "as promised"), (83, "fewer"), (97, "more")])
def test_a_share_is_named_by_two_standard_errors_of_what_was_promised(right, word):
    share = Share(hits(100, right), 0.9)
    assert share.error == pytest.approx(0.03)
    assert share.verdict == word


def test_few_rows_are_not_judged():
    assert Share(hits(ENOUGH - 1, 0), 0.9).verdict == "unknown"
    assert Gain.of(np.ones(ENOUGH - 1)).verdict == "unknown"
    assert Share(hits(ENOUGH, 0), 0.9).verdict == "fewer"


def test_a_promise_that_is_itself_uncertain_is_harder_to_break():
    assert Share(hits(100, 83), 0.9).verdict == "fewer"
    assert Share(hits(100, 83), 0.9, extra=0.03**2).verdict == "as promised"


def test_a_gain_needs_two_standard_errors():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    noise -= noise.mean()
    error = noise.std(ddof=1) / 20
    verdicts = [Gain.of(noise + shift * error).verdict for shift in (-2.1, -1.9, 0, 1.9, 2.1)]
    assert verdicts == ["worse", "no difference", "no difference", "no difference", "better"]


def test_a_difference_between_groups_has_the_errors_of_both():
    a, b = np.array([1.0, 3.0] * 10), np.array([0.0, 4.0] * 40)
    gain = Gain.between(a, b)
    assert gain.error == pytest.approx(math.sqrt(a.var(ddof=1) / 20 + b.var(ddof=1) / 80))
    assert Gain.between(a, b[:1]).verdict == "unknown"


def test_rates_of_words_by_chance_are_as_the_page_says():
    """About one look in twenty finds a difference where there is none."""
    rng = np.random.default_rng(0)
    found = np.mean([Share(rng.random(200) < 0.9, 0.9).verdict != "as promised" for _ in range(2000)])
    assert 0.02 < found < 0.08


def test_what_is_no_number_is_a_dash():
    assert {number(v) for v in (None, math.nan, math.inf, "text")} == {number(None)}
    assert percent(math.nan) == percent(None) == number(None)
    assert listed([]) == ""
