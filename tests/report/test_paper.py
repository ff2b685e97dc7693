import json
import shutil
from pathlib import Path

import pytest

from bbalpha.experiments.results import write
from bbalpha.report import paper_report, published
from bbalpha.report.paper_parts import compared
from bbalpha.report.published import Score

ROOT = Path(__file__).parents[2]


def uci(folder, dataset, nll, *, splits=20, command="bbalpha reproduce regression"):
    """Results whose mean over splits is {alpha: nll}."""
    rows = [
        {"dataset": dataset, "method": "bbalpha", "alpha": alpha, "split": s, "nll": mean + 0.01 * (-1) ** s,
         "rmse": 1.0, "coverage90": 0.9}
        for alpha, mean in nll.items() for s in range(splits)
    ]  # fmt: skip
    write(folder / "regression" / f"{dataset}.json", command=command, seed=0, seconds=60, rows=rows)


def test_the_results_of_the_repository_make_a_page(read):
    page = read(paper_report(ROOT / "results"))
    text = page.plain()
    assert len(page.pictures()) == 6
    for path in sorted((ROOT / "results" / "regression").glob("*.json")):
        content = json.loads(path.read_text())
        assert content["command"] in text
        assert path.stem in text
    assert "Not measured" not in text
    for (dataset, _, _), score in published.table().items():
        if dataset in ("boston", "year"):
            assert f"{score.mean:.2f}" in text


@pytest.mark.usefixtures("words_only")
def test_numbers_of_the_paper_stand_beside_ours(tmp_path, read):
    uci(tmp_path, "boston", {0.0: 2.0, 0.5: 1.75, 1.0: 2.5})
    text = read(paper_report(tmp_path)).plain()
    assert "boston 2.00 ± 0.00 2.42 ± 0.05 1.75 ± 0.00 2.38 ± 0.06 2.50 ± 0.00 2.50 ± 0.10" in text
    assert "by negative log-likelihood: better on 1 (boston)" in text
    assert "split by split: better on 1 (boston)" in text
    assert "1 of 1" in text


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize(("half", "word"), [(2.38, "alike"), (2.25, "better"), (2.52, "worse")])
def test_words_follow_the_numbers(tmp_path, read, half, word):
    """The paper's alpha 0.5 on boston is 2.38 with an error of 0.06."""
    uci(tmp_path, "boston", {0.0: half, 0.5: half, 1.0: half})
    text = read(paper_report(tmp_path)).plain()
    assert f"by negative log-likelihood: {word} on 1 (boston)" in text
    assert "split by split: not told apart on 1 (boston)" in text


@pytest.mark.usefixtures("words_only")
def test_one_split_is_not_judged(tmp_path, read):
    uci(tmp_path, "boston", {0.0: 0.0, 0.5: 0.0, 1.0: 0.0}, splits=1)
    text = read(paper_report(tmp_path)).plain()
    assert "not judged on 1 (boston)" in text
    assert "better on" not in text


@pytest.mark.usefixtures("words_only")
def test_what_is_missing_is_named_with_its_command(tmp_path, read):
    for name in ("regression", "classification", "runtime", "adversarial"):
        text = read(paper_report(tmp_path)).plain()
        assert f"bbalpha reproduce {name} makes it" in text
    uci(tmp_path, "boston", {0.5: 2.0})
    text = read(paper_report(tmp_path)).plain()
    assert "bbalpha reproduce regression makes it" not in text
    assert "bbalpha reproduce adversarial makes it" in text
    with pytest.raises(FileNotFoundError, match="no folder"):
        paper_report(tmp_path / "none")


@pytest.mark.usefixtures("words_only")
def test_a_network_that_is_missing_is_named(tmp_path, read):
    (tmp_path / "classification").mkdir()
    shutil.copy(ROOT / "results/classification/cnn.json", tmp_path / "classification")
    text = read(paper_report(tmp_path)).plain()
    assert "bbalpha reproduce classification makes it" in text
    assert "Digits, a convolutional network" in text


@pytest.mark.usefixtures("words_only")
def test_a_quick_run_is_called_one(tmp_path, read):
    uci(tmp_path, "boston", {0.5: 2.0}, command="bbalpha reproduce regression --quick")
    assert "do not compare with the paper" in read(paper_report(tmp_path)).plain()


@pytest.mark.usefixtures("words_only")
def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "regression").mkdir()
    (tmp_path / "regression" / "boston.json").write_text("{}")
    with pytest.raises(ValueError, match=r"boston.json' is no results file"):
        paper_report(tmp_path)
    (tmp_path / "regression" / "boston.json").write_text("no json")
    with pytest.raises(ValueError, match=r"boston.json' is no results file"):
        paper_report(tmp_path)


@pytest.mark.usefixtures("words_only")
def test_files_of_other_names_are_left_alone(tmp_path, read):
    for name in ("regression", "runtime", "classification"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.json").write_text("{}")
    assert "Not measured" in read(paper_report(tmp_path)).plain()


def test_two_digits_in_print_are_worth_no_more():
    ours, theirs = Score(0.076, 0.0001, 20), Score(0.08, 0.0)
    assert compared(ours, theirs) == "lower"
    assert compared(ours, theirs, rounding=0.01) == "alike"


def test_the_published_table_is_as_printed():
    table = published.table()
    assert len({dataset for dataset, _, _ in table}) == 10
    assert table["year", "nll", "alpha=1.0"].mean == -3.59  # as printed
