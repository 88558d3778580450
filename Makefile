# Two commands: `make demo` and `make test`. Each makes the environment it needs in .venv.
# `make results NAME=resnet20` repeats a table of docs/tables; without a name it lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint check-readme check-results gallery results clean

demo: $(VENV)/demo.stamp
	$(BIN)/pwfn demo --out demo

test: $(VENV)/test.stamp lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore tests/published
	$(MAKE) check-results

# The published results: every page and figure is that of the files in experiments/results. Takes seconds.
check-results: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/published

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every command of the README, for real: for a fresh clone. It downloads CIFAR-10 and trains on it.
check-readme: $(VENV)/test.stamp
	$(BIN)/python tests/test_readme.py

# The demo's report and its figures as pictures, under gallery/; of the page itself where there is a Chromium.
gallery: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python experiments/gallery.py --out gallery

# Starts or resumes the runs of a plan, in tables/, and keeps their figures in experiments/results. NAME may be several.
results: $(VENV)/test.stamp
	$(BIN)/python experiments/results.py $(if $(NAME),run $(NAME),list)

clean:
	rm -rf $(VENV) build dist

# torch first and alone: it is the one package whose pinned build must be there before others ask for it.
$(VENV)/demo.stamp: pyproject.toml constraints.txt hatch_build.py src/pwfn/file/native.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@
