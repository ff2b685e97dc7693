# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each builds .venv by itself and installs again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-torch lint format bench bench-against figures tables clean
.DELETE_ON_ERROR:

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/python -m bbalpha.experiments.demo

test: lint
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
