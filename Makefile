# make demo   every embedded base, unguarded and guarded, written to out/gallery/index.html
# make test   the test suite          make lint   formatter, linter, type checker
# make eval-small  attacks, defences and benign prompts in small, with a report page in runs/eval-small
# make bench  cost ratios at full SD 1.5 size (slow, about half an hour on two cores)
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench eval-small clean

demo: $(STAMP)
	$(BIN)/guardpaint demo --out out/gallery

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[ray]"
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

eval-small: $(STAMP)
	for a in sneakyprompt mma pgj daca ring_a_bell; do $(BIN)/guardpaint eval attack $$a --base mini-sd --count 8 --out runs/attacks-small; done
	$(BIN)/guardpaint eval run attacks --base mini-sd --defence undefended --defence paper --defence ours --n 8 --attacks runs/attacks-small --out runs/eval-small
	$(BIN)/guardpaint eval run benign --base mini-sd --defence undefended --defence ours --n 40 --out runs/eval-small

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,bench]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache
