# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each builds .venv by itself and installs again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: browser demo test test-torch lint format bench bench-against figures tables clean
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

figures: .venv/.installed
	$(BIN)/python docs/make_figures.py

tables: .venv/.installed
	$(BIN)/python docs/make_tables.py

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
