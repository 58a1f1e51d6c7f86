# make demo   guarded generation on every family, written to out/gallery/index.html
# make test   the test suite          make lint   formatter, linter, type checker
# make bench  cost ratios at full SD 1.5 size (slow, about half an hour on two cores)
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench clean

demo: $(STAMP)
	$(BIN)/guardpaint demo --out out/gallery

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

bench: $(STAMP)
	$(BIN)/python bench/run.py --out docs/results/bench.json

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache
