# make demo   every embedded base, unguarded and guarded, written to out/gallery/index.html
# make test   the test suite          make lint   formatter, linter, type checker
# make eval-small  attacks, defences and benign prompts in small, with a report page in runs/eval-small
# make bench  cost ratios at full SD 1.5 size (about 15 minutes on two idle cores)
# make redteam attacks, fuzzing and a soak against a running service on loopback (at most 15 minutes on two cores)
# make golden pictures of this tree compared bit for bit with those of a reference revision (2 minutes)
# make wheels both packages as wheels in dist/
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench redteam golden wheels hero eval-small clean
CODE   := src packages tests bench conftest.py

demo: $(STAMP)
	$(BIN)/guardpaint demo --out out/gallery

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[ray]" -e packages/paperdolls
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# The reference is drawn on this machine: last bits depend on the processor.
REFERENCE := 157dbca
golden: $(STAMP)
	test -d build/golden-tree || git worktree add -f build/golden-tree $(REFERENCE)
	PYTHONPATH=build/golden-tree/src $(BIN)/python bench/golden.py draw build/golden-reference
	$(BIN)/python bench/golden.py draw build/golden-new
	$(BIN)/python bench/golden.py compare build/golden-reference build/golden-new

wheels: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist . packages/paperdolls

hero: $(STAMP)
	$(BIN)/python bench/hero.py docs/images/hero.png

bench: $(STAMP)
	$(BIN)/python bench/run.py --out docs/results/bench.json

redteam: $(STAMP)
	$(BIN)/python bench/redteam.py

SMALL = $(BIN)/guardpaint eval run attacks --base mini-sd --attacks runs/attacks-small --processes 2 --out runs/eval-small
eval-small: $(STAMP)
	for a in sneakyprompt mma pgj daca ring_a_bell; do $(BIN)/guardpaint eval attack $$a --base mini-sd --count 8 --out runs/attacks-small || exit 1; done
	$(SMALL) --defence undefended --defence paper --defence ours --defence ours_ladder_off --n 8
	$(SMALL) --defence negative_prompt --defence prompt_filter --defence sld --defence embedding_projection --n 4
	$(SMALL) --defence post_hoc_block --defence post_hoc_regenerate --defence post_hoc_blur --defence post_hoc_inpaint --n 4
	$(SMALL) --defence ablation:reinsertion --defence ablation:view --n 2
	$(BIN)/guardpaint eval run benign --base mini-sd --defence undefended --defence ours --n 60 --processes 2 --out runs/eval-small
	$(BIN)/guardpaint eval adaptive --guard packages/paperdolls/src/paperdolls/assets/guard --count 20 --disguises 2 --results runs/eval-small/adaptive.json
	$(BIN)/guardpaint eval report runs/eval-small --adaptive runs/eval-small/adaptive.json --results runs/eval-small/evaluation.json

$(STAMP): pyproject.toml packages/paperdolls/pyproject.toml packages/paperdolls/setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,bench]" -e packages/paperdolls
	touch $(STAMP)

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache
