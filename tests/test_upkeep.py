"""What a repository says of itself in several places is the same in all of them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def pythons():
    """The versions of Python that were tried, as the classifiers have them."""
    return [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]


def workflow():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def test_one_version_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changelog, re.M).groups()
    assert Version(PROJECT["version"]) >= Version(version)
    if PROJECT["version"] == version:
        assert (CITATION["version"], str(CITATION["date-released"])) == (version, date)
    assert changelog.index("## Unreleased") < changelog.index(f"## {version} - ")


def test_authors_and_licence_are_those_of_the_citation():
    assert [author["name"] for author in PROJECT["authors"]] == [author["name"] for author in CITATION["authors"]]
    assert PROJECT["license"] == CITATION["license"]


def test_readme_names_every_extra():
    install = (ROOT / "README.md").read_text().partition("| extra | for |")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", install)) - {"bbalpha"} >= PROJECT["optional-dependencies"].keys() - {"demo"}


def test_python_of_readme_classifiers_and_continuous_integration_are_the_same():
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert workflow()["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons()
    assert f"Python {pythons()[0]} to {pythons()[-1]}" in (ROOT / "README.md").read_text()


def test_continuous_integration_runs_what_people_run():
    jobs = workflow()["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {"make test", "make docs", "make dist"} <= set(commands)
    wanted = {command.split()[1] for command in commands}
    to_come = set() if (ROOT / "docs" / "conf.py").exists() else {"docs"}
    assert wanted <= TARGETS | to_come, "a job must run a target of the Makefile"
    for job in jobs.values():
        assert job["runs-on"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert workflow()[True].keys() == {"push", "pull_request"}  # YAML 1.1 reads `on` as a truth value


def test_targets_that_are_no_files_are_told_to_make():
    phony = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split())
    assert phony == TARGETS


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_each_question_once(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    asked = [(part["id"], part["attributes"]["label"]) for part in form["body"]]
    assert len(dict(asked)) == len(asked) > 0
    assert {part["type"] for part in form["body"]} <= {"input", "textarea"}
    assert any(part.get("validations", {}).get("required") for part in form["body"])
