# Every target works on a fresh checkout with nothing but Python 3.10+: the first one builds .venv.
# test-slow and bench also compile models, for which torch's inductor needs a C++ compiler (g++ or clang++).
PYTHON ?= python3
# Any torch of which constraints/ has a file: 2.13.0 in .venv, another one in .venv-torch-<version>, which points into a cache folder.
TORCH ?= 2.13.0
VERSIONS := 2.11.0 2.12.1 2.14.1 2.15.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONSTRAINTS := constraints/torch-$(TORCH).txt
TOOLS := constraints/tools.txt

# What depends on torch, for a second version in CI.
PARTS := numerics composition core behaviour extensions meshes compat compile optim activations/test_checkpointing.py test_errors.py checkpoint/test_checkpointer.py checkpoint/test_dcp.py

.PHONY: help demo elastic docs test test-slow test-full test-clients test-parts test-versions fuzz gpu check release-check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        train a small language model, sharded over two processes"
	@echo "make elastic     kill ranks of a training for two minutes; it goes on from checkpoints in memory"
	@echo "make test        all tests but the slow ones"
	@echo "make test-slow   the slow ones"
	@echo "make test-full   those that CI has no time for"
	@echo "make test-clients  the programs of examples/clients/, on fsdp2 and on torch's FSDP2"
	@echo "make test-parts  those of the parts that depend on torch: for TORCH=2.15.0"
	@echo "make test-versions  all tests and the slow ones of the compiler on $(VERSIONS)"
	@echo "make fuzz        random programs, sharded and unsharded: SEEDS=first:last"
	@echo "make gpu         what only GPUs can show, on this computer's: one or several; ONLY=names, GPU_PYTHON=python of an environment with torch"
	@echo "make check       lint, format, types, and which part may import which"
	@echo "make release-check  the wheel works in a bare environment"
	@echo "make docs        the documentation site: docs/_build/html/index.html"
	@echo "make bench       the benchmarks"
	@echo "make clean       remove caches and .venv*"
	@echo "TORCH=2.15.0 after any of them takes that version of torch instead of 2.13.0"

# A stamp, so that a change of the dependencies installs them again.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) $(TOOLS) constraints/environment.sh
ifeq ($(VENV),.venv)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c $(TOOLS) pip
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -c $(TOOLS) -e . --group dev
else
	PYTHON=$(PYTHON) constraints/environment.sh $(TORCH) $(VENV)
endif
	touch $@

demo: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} KINETO_LOG_LEVEL=6 TORCH_CPP_LOG_LEVEL=ERROR \
	    $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_lm.py --inspect

elastic: $(INSTALLED)
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python examples/elastic/run.py --seconds 120

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not full"

# Exit status 5 is pytest's "no test was selected": fine while nothing is marked slow.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow and not full" $(SLOW) || test $$? -eq 5

# What does not fit into CI's time.
test-full: $(INSTALLED)
	$(BIN)/python -m pytest -m full $(FULL)

# The clients' packages in an environment of their own, which takes all else from the other: some hold back versions that dev wants newer.
test-clients: $(VENV)-clients/.installed
	$(VENV)-clients/bin/python -m pytest -m "slow or full" tests/examples/test_clients.py tests/clients

$(VENV)-clients/.installed: $(INSTALLED)
	$(PYTHON) -m venv $(VENV)-clients
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(VENV)-clients/bin/python -m pip install -c $(CONSTRAINTS) -e '.[clients]'
	touch $@

test-parts: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not full" $(addprefix tests/,$(PARTS))

test-versions:
	for version in $(VERSIONS); do \
	    $(MAKE) test TORCH=$$version && $(MAKE) test-slow TORCH=$$version SLOW=tests/compile || exit; done

# Failures are shrunk and printed. LOG=file keeps results, and goes on where it was stopped; LIB=torch runs torch's FSDP2 instead.
SEEDS ?= 0:1000
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz $(SEEDS) $(if $(LOG),--log $(LOG)) $(if $(LIB),--lib $(LIB))
	test ! -e tests/fuzz/test_checkpoint_mutants.py || FUZZ_MUTANTS=1000 $(BIN)/python -m pytest tests/fuzz/test_checkpoint_mutants.py

# A table, gpu-results/results.json and results.md (docs/gpu.md). Status 3: there is no GPU. GPU_PYTHON: where .venv's torch is not the
# one that your driver needs.
gpu: $(if $(GPU_PYTHON),,$(INSTALLED))
	$(or $(GPU_PYTHON),$(BIN)/python) tests/gpu $(if $(ONLY),--only $(ONLY)) $(if $(BUDGET),--budget $(BUDGET))

check: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff format --check --line-length 88 README.md docs/*.md docs/*/*.md
	$(BIN)/python -m mypy
	$(BIN)/python -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache

# Warnings are errors: a link or a name that does not exist ends the build.
docs: $(VENV)/.docs-installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(VENV)/.docs-installed: $(INSTALLED)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -c $(TOOLS) --group docs
	touch $@

# The wheel in a bare environment, and the README's program: TORCH=2.15.0 for the torch that people install, DIST=dist to keep what was built.
release-check: $(INSTALLED)
	$(BIN)/python constraints/release_check.py $(DIST)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv .venv-torch-* .venv-clients .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
