# Everything runs in .venv, which is made at first use from the pinned requirements.txt.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs bench clean

# Fonts, rendering, training on two ranks, evaluation and report; goes on with a training that was interrupted.
# DEMO_ARGS goes to the program: make demo DEMO_ARGS=--help
demo: .venv/ready
	$(BIN)/python -m examples.characters $(DEMO_ARGS)

test: .venv/ready
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/sphinx-build --fail-on-warning --keep-going -q docs docs/_build/html

# Speed and memory beside plain PyTorch, as docs/speed.md has them; BENCH_ARGS goes to the program.
bench: .venv/ready
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

.venv/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf .venv .cache runs docs/_build
