# Every target works on a fresh checkout with nothing but Python 3.10+: the first one builds .venv.
# test-slow and bench also compile models, for which torch's inductor needs a C++ compiler (g++ or clang++).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help demo test test-slow fuzz check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        train a small language model, sharded over two processes"
	@echo "make test        all tests but the slow ones"
	@echo "make test-slow   the slow ones"
	@echo "make fuzz        random programs, sharded and unsharded: SEEDS=first:last"
	@echo "make check       lint, format, types, and which part may import which"
	@echo "make bench       the benchmarks"
	@echo "make clean       remove caches and .venv"

# A stamp, so that a change of the dependencies installs them again.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

demo: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node 2 examples/train_lm.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

# Exit status 5 is pytest's "no test was selected": fine while nothing is marked slow.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow || test $$? -eq 5

# Failures are shrunk and printed. LOG=file keeps results, and goes on where it was stopped; LIB=torch runs torch's FSDP2 instead.
SEEDS ?= 0:1000
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz $(SEEDS) $(if $(LOG),--log $(LOG)) $(if $(LIB),--lib $(LIB))
	test ! -e tests/fuzz/test_checkpoint_mutants.py || FUZZ_MUTANTS=1000 $(BIN)/python -m pytest tests/fuzz/test_checkpoint_mutants.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
