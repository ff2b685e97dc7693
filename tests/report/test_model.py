from dataclasses import replace

import numpy as np
import pandas
import pytest

from bbalpha import BBAlphaRegressor
from bbalpha.report import model_report
from bbalpha.report.judging import SCORES
from bbalpha.report.words import number
from bbalpha.tabular.fields import Field
from bbalpha.tabular.fitting import evaluate
from bbalpha.tabular.model import TableModel


def with_card(model, **changes):
    return replace(model, card=replace(model.card, **changes))


def invented(model, scale, n=300, **more):
    """The model with a card whose targets lie `scale` predicted deviations around the means."""
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=n), np.full(n, 0.5)
    columns = {
        "mean": mean, "std": std, "epistemic_std": 0.3 * std, "aleatoric_std": std, "low": mean - 1.645 * std,
        "high": mean + 1.645 * std, "unusual": np.zeros(n, bool), "target": mean + scale * std * rng.normal(size=n),
    } | more  # fmt: skip
    held = {name: values.tolist() for name, values in columns.items()}
    return with_card(model, held_out=held, n_held_out=n)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_everything_on_the_card_is_on_the_page(task, read, request):
    model = request.getfixturevalue(task)
    page = read(model_report(model))
    card, text = model.card, page.plain()
    for field in card.fields:
        assert field.name in text
        assert all(level in text for level in field.levels)
    for name, score in card.scores.items():
        assert SCORES[name][0] in text
        assert number(score) in text
    assert all(number(score) in text for score in card.guess.values())
    assert all(name in text for name in (*card.drivers, *card.left_out, *card.left_out.values()))
    assert all(number(v, 3) in text for found in card.drivers.values() for v in found.values())
    assert all(word in text for word in ("10 <relu>", "1.25", "houses & co.csv", "chosen at random", "280 rows"))
    assert all(name in text for name in model.classes)
    assert card.target in text
    assert "torch 2.13" in text
    assert len(page.pictures()) == (4 if task == "regression" else 2)


def test_text_out_of_the_data_is_escaped(regression, read):
    html = model_report(regression)
    read(html)
    assert "<script" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;alert(1)" in html


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize(
    ("scale", "words", "not_words"),
    [(1.0, "within two standard errors of the promise", "too narrow."), (2.0, "they are too narrow", "wider than"),
     (0.3, "wider than need be", "too narrow.")],
)  # fmt: skip
def test_intervals_are_called_what_they_are(regression, read, scale, words, not_words):
    text = read(model_report(invented(regression, scale))).plain()
    assert words in text
    assert not_words not in text


@pytest.mark.usefixtures("words_only")
def test_a_model_that_is_worse_than_its_guess_is_called_so(regression, read):
    rng = np.random.default_rng(1)
    text = read(model_report(invented(regression, 1.0, target=rng.normal(size=300) * 0.1))).plain()
    assert "NOT closer to the targets" in text
    assert "Do not use it as it is" in text


@pytest.mark.usefixtures("words_only")
def test_uncertainty_that_knows_nothing_of_the_errors_is_not_praised(regression, read):
    assert "cannot be told apart" in read(model_report(invented(regression, 1.0))).plain()
    spread = np.linspace(0.01, 2, 300)
    rng = np.random.default_rng(2)
    mean = rng.normal(size=300)
    knowing = invented(regression, 1.0, mean=mean, std=spread, target=mean + spread * rng.normal(size=300))
    assert "worse where it says that it is unsure" in read(model_report(knowing)).plain()


@pytest.mark.usefixtures("words_only")
def test_ranks_on_the_card_are_used_as_they_are(regression, read):
    """Without them each prediction is taken as normal, and the page says so."""
    assert "taken as normal" in read(model_report(invented(regression, 1.0))).plain()
    ranks = (np.arange(300) + 0.5) / 300
    text = read(model_report(invented(regression, 1.0, pit=ranks))).plain()
    assert "taken as normal" not in text
    assert all(f"{level} % {level}.0 % ±" in text for level in (50, 60, 70, 80))


def sure(model, confidence, right):
    n = 400
    probs = np.full((n, 2), 1 - confidence)
    probs[:, 0] = confidence
    target = np.where(np.arange(n) < right * n, model.classes[0], model.classes[1])
    held = {f"p_{c}": probs[:, i].tolist() for i, c in enumerate(model.classes)}
    held |= {k: [0.1] * n for k in ("entropy", "mutual_information")}
    held |= {"unusual": [False] * n, "label": [model.classes[0]] * n, "target": target.tolist()}
    return with_card(model, held_out=held, n_held_out=n)


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize(
    ("right", "words", "chance"),
    [(0.8, "as sure as right", "no more than"), (0.7, "too sure of itself", "it is more than"),
     (0.9, "less sure than it could be", "it is more than")],
)  # fmt: skip
def test_probabilities_are_called_what_they_are(classification, read, right, words, chance):
    text = read(model_report(sure(classification, 0.8, right))).plain()
    assert words in text
    assert f"{chance} chance would make" in text


@pytest.mark.usefixtures("words_only")
def test_rows_given_are_judged_in_place_of_those_held_out(regression, classification, fresh, read):
    frame, y = fresh
    for model, target in ((regression, y), (classification, np.where(y > 1, *model_classes(classification)))):
        rows = frame.assign(**{model.card.target: target})
        text = read(model_report(model, frame=rows)).plain()
        assert all(number(score) in text for score in evaluate(model, rows).values())
        assert all(number(score) in text for score in model.card.scores.values())  # beside them
        assert "150 rows given to this report" in text
        assert "taken as normal" not in text
        assert "set by these very rows" not in text


def model_classes(model):
    return model.classes


@pytest.mark.usefixtures("words_only")
def test_rows_from_elsewhere_are_told(regression, fresh, read):
    frame, y = fresh
    rows = frame.assign(**{regression.card.target: y, "size": frame["size"] * 40})
    assert "They are not like the rows of the fit" in read(model_report(regression, frame=rows)).plain()


@pytest.mark.usefixtures("words_only")
def test_rows_must_have_targets(regression, fresh):
    with pytest.raises(ValueError, match="no column 'price <i>'"):
        model_report(regression, frame=fresh[0])


@pytest.mark.usefixtures("words_only")
def test_a_model_without_held_out_rows_claims_nothing(regression, read):
    empty = {"held_out": {}, "scores": {}, "guess": {}, "drivers": {}, "threshold": None, "n_held_out": 0}
    page = read(model_report(with_card(regression, **empty)))
    assert "nothing is known of how good it is" in page.plain()
    assert page.pictures() == []
    for word in ("too narrow", "honest", "better than", "closer to"):
        assert word not in page.plain()


@pytest.mark.usefixtures("words_only")
def test_a_model_saved_from_python_has_a_page(tmp_path, read):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 200))
    estimator = BBAlphaRegressor(hidden_layer_sizes=(10,), noise="constant", epochs=2, n_ensemble=1).fit(X, X[:, 0])
    estimator.save(tmp_path / "m")
    page = read(model_report(TableModel.load(tmp_path / "m")))
    assert all(f"x{i} " in page.plain() for i in range(200))
    assert "without a card" in page.plain()
    fresh = pandas.DataFrame(rng.normal(size=(30, 200)), columns=[f"x{i}" for i in range(200)])
    text = read(model_report(TableModel.load(tmp_path / "m"), frame=fresh.assign(target=fresh["x0"]))).plain()
    assert "30 rows given to this report" in text


@pytest.mark.usefixtures("words_only")
def test_few_rows_are_shown_and_not_judged(regression, read):
    text = read(model_report(invented(regression, 3.0, n=5))).plain()
    assert "too few" in text
    assert "too narrow." not in text


def test_many_rows_make_no_large_page_and_one_row_makes_one(regression, read):
    read(model_report(invented(regression, 3.0, n=1)))
    read(model_report(invented(regression, 1.0, n=20_000)))


def test_a_damaged_card_is_one_sentence(regression, classification):
    for model, name in ((regression, "std"), (classification, "p_low")):
        held = {k: v for k, v in model.card.held_out.items() if k != name}
        with pytest.raises(ValueError, match=f"must keep '{name}'"):
            model_report(with_card(model, held_out=held))


@pytest.mark.usefixtures("words_only")
def test_gaps_where_numbers_were_not_finite_are_left_out(regression, read):
    model = invented(regression, 1.0)
    held = {name: list(cells) for name, cells in model.card.held_out.items()}
    held["low"][3] = held["target"][5] = None
    page = read(model_report(with_card(model, held_out=held, scores={"nll": None, "odd score": 3.25})))
    assert "298 rows" in page.plain()
    assert "odd score" in page.plain()
    assert "nan" not in page.plain().split()
    all_gone = {name: [None] * 300 for name in held}
    assert "nothing is known" in read(model_report(with_card(model, held_out=all_gone))).plain()


def test_one_class_in_the_held_out_rows(classification, read):
    n = 30
    held = {f"p_{c}": [float(i == 0)] * n for i, c in enumerate(classification.classes)}
    held |= {k: [0.0] * n for k in ("entropy", "mutual_information")}
    held |= {"unusual": [False] * n, "target": [classification.classes[0]] * n}
    text = read(model_report(with_card(classification, held_out=held, n_held_out=n))).plain()
    assert "No row was given a wrong class" in text
    assert "cannot be told from 30 rows" in text


def test_two_hundred_fields_with_long_names(regression, read):
    fields = tuple(Field(f"{i} " + "x" * 80, "level", levels=("a" * 300,), n_levels=1) for i in range(200))
    drivers = {f.name: {"prediction": 0.1 * i, "ignorance": 0.0} for i, f in enumerate(fields)}
    text = read(model_report(with_card(regression, fields=fields, drivers=drivers))).plain()
    assert all(f.name in text for f in fields)
    assert "The other 175 columns move it less" in text


@pytest.mark.usefixtures("words_only")
def test_the_split_decides_what_the_limits_say(regression, read):
    by_time = read(model_report(with_card(regression, split="the last by 'day'"))).plain()
    assert "the time right after" in by_time
    assert "--time day" in by_time
    groups = {"split": "3 of 9 groups of 'who'", "left_out": {"who": "groups"}}
    by_group = read(model_report(with_card(regression, **groups))).plain()
    assert "groups that were not there at the fit" in by_group
    assert "--group who" in by_group


@pytest.mark.usefixtures("words_only")
def test_what_was_typed_can_be_typed_again(regression, read):
    text = read(model_report(regression)).plain()
    assert "bbalpha fit 'houses & co.csv' --target 'price <i>' -o model --held-out 0.3 --seed 7" in text
    chosen = {"left_out": {"a": "asked for", "b c": "asked for"}, "n_rows": 90, "n_held_out": 10, "facts": {}}
    text = read(model_report(with_card(regression, **chosen))).plain()
    assert "bbalpha fit TABLE.csv --target 'price <i>' -o model --drop 'a,b c' bbalpha report model" in text
    known = with_card(regression, facts={**regression.card.facts, "command": "bbalpha fit x.csv --budget 2m"})
    text = read(model_report(known)).plain()
    assert "bbalpha fit x.csv --budget 2m" in text
    assert "--target" not in text  # what was typed, and no guess at it


def test_a_page_is_the_same_each_time(regression):
    assert model_report(regression) == model_report(regression)
