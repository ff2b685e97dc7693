# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each builds .venv by itself and installs again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: api audit bench bench-against browser clean coverage demo dist docs extras figures format lint newcomer notebooks pins tables test test-frameworks test-torch torture
.DELETE_ON_ERROR:

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# what the uncertainty is worth; then a model of a table and its report, and a model of digits to play with
demo: .venv/.installed
	$(BIN)/python -m bbalpha.experiments.demo
	mkdir -p demo
	$(BIN)/python -c "from sklearn.datasets import load_diabetes as d; d(as_frame=True).frame.to_csv('demo/diabetes.csv', index=False)"
	$(BIN)/bbalpha fit demo/diabetes.csv --target target --budget quick -o demo/diabetes
	$(BIN)/python -m bbalpha.experiments.digits --out demo/digits
	$(BIN)/bbalpha report demo/diabetes -o demo/report.html
	@echo "A page to draw digits on: $(BIN)/bbalpha serve demo/digits demo/diabetes"

# the tests of the web page need a browser
browser:
	@command -v chromium > /dev/null \
		|| { test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y -q --no-install-recommends chromium; } > /dev/null 2>&1 \
		|| echo "No chromium here and none could be installed: the tests of the web page cannot run."

test: lint browser
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# Keras, JAX, Lightning, transformers and the others, with the real packages: minutes of imports
test-frameworks: .venv/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "frameworks and not slow"

# The declared range of versions, tried: make test-torch VERSION=2.13.0 CONSTRAINTS=constraints-lowest.txt
# (a build of torch with CUDA where there is no other: gigabytes; in an environment of its own, not in CI)
test-torch:
	test -n "$(VERSION)"
	test -x .venv-torch-$(VERSION)/bin/python || $(PYTHON) -m venv .venv-torch-$(VERSION)
	.venv-torch-$(VERSION)/bin/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) \
		torch==$(VERSION) --editable '.[dev]'
	.venv-torch-$(VERSION)/bin/python -m pytest -q -n 2 --dist loadfile

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed
	$(BIN)/python benchmarks/engine.py

bench-against: .venv/.installed
	$(BIN)/python benchmarks/against.py $(BASE)

# bad input, faults, forged models, load: results/torture.json, in half an hour; goes on where it was cut off
torture: .venv/.installed
	$(BIN)/python -m tests.torture

figures: .venv/.installed
	$(BIN)/python docs/make_figures.py

tables: .venv/.installed
	$(BIN)/python docs/make_tables.py

# the site, in docs/_build/html; a warning is an error
docs: .venv/.installed
	$(BIN)/python -m sphinx -q -W --keep-going -n docs docs/_build/html

# the notebooks of the site, run anew from docs/notebooks/*.py
notebooks: .venv/.installed
	$(BIN)/python tools/notebooks.py

# the public names as text, api/VERSION.txt, and what is gone, changed and new since the release before
api: .venv/.installed
	$(BIN)/python tools/api.py

# what is known against our code and our pins, in an environment of its own; needs a service that knows of faults
audit:
	test -x .venv-audit/bin/bandit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet bandit pip-audit
	.venv-audit/bin/bandit --quiet --configfile pyproject.toml --recursive src
	.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

# wheel and sdist in dist/, looked into and tried in an empty environment
dist: .venv/.installed
	$(BIN)/python tools/distribution.py

# each extra alone in an empty environment: results/extras.json (EXTRAS="keras jax": these only, and again)
extras: .venv/.installed
	$(BIN)/python tools/extras.py $(EXTRAS)

# the way of a new user, timed: results/newcomer.json
newcomer: .venv/.installed
	$(BIN)/python tools/newcomer.py

# constraints.txt from what is installed here; update .venv first: pip install --upgrade --editable '.[dev,versus]'
pins: .venv/.installed
	$(BIN)/python tools/pins.py

coverage: .venv/.installed
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -q -n 2 --dist loadfile
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .coverage* .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
