# The way in for developers: `make help` lists every target.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
PEERS := .venv-peers/.built
SOURCES := setup.py pyproject.toml \
    $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cpp csrc/*/*.map)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv build demo test quick test-integrations test-trainers demo-trainers prove mutants sanitize programs bench
.PHONY: latency peers ladder larger tune lint gpu clean

help: ## List every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Create .venv and install the pinned dependencies

build: $(BUILT) ## Build both extensions in place (again when a source changed)

demo: $(BUILT) ## Watch a training run survive out-of-memory (results in demo-output/)
	$(PY) examples/demo/demo.py --output demo-output

# Workers are processes of their own; what one of them changes in torch no other one sees.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal

test: $(BUILT) ## Run the test suite; needs no GPU
	$(PY) -m pytest tests -m "not gpu" $(WORKERS) $(PYTEST_ARGS)

quick: $(BUILT) ## Run in a minute what a change needs first; FOLDER=undo for tests/undo, too
	$(PY) -m pytest tests/house tests/core tests/mutants $(addprefix tests/,$(FOLDER)) \
	    $(WORKERS) $(PYTEST_ARGS)

# One for each: Optuna 4 and 5 cannot live in one environment. oomkit is not installed there:
# .venv's build fits them, for Python and torch are the same.
test-integrations: $(BUILT) .venv-optuna5/.installed .venv-optuna4/.installed ## Run the tests of other frameworks (the first time 5 minutes more)
	set -e; for version in 5 4; do PYTHONPATH=. .venv-optuna$$version/bin/python -m pytest \
	    tests/integrations $(PYTEST_ARGS); done

# Two again: both sides pin libraries of their own.
test-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## Run the tests of trainers: transformers, TRL, Lightning, Ignite, accelerate (the first time 5 minutes more)
	set -e; for which in trainers trainers-lightning; do PYTHONPATH=. .venv-$$which/bin/python \
	    -m pytest tests/trainers $(PYTEST_ARGS); done

demo-trainers: export OMP_NUM_THREADS = 1
demo-trainers: export PYTHONPATH = .
demo-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## Watch trainers survive out-of-memory: transformers, TRL, Lightning
	set -e; for mode in "" --plain; do \
	    for name in finetune_trainer dpo; do \
	        .venv-trainers/bin/python -W ignore examples/$$name.py $$mode; done; \
	    .venv-trainers-lightning/bin/python -W ignore examples/lightning_autobatch.py $$mode; done

prove: export PYTHONPATH := tests
prove: $(BUILT) ## Fail every allocation of every model, and more (about 45 minutes)
	$(PY) -m prove $(PROVE_ARGS)

mutants: export PYTHONPATH := tests
mutants: $(BUILT) ## Break one invariant at a time: tests must tell (under 30 minutes)
	$(PY) -m mutants $(MUTANTS_ARGS)

sanitize: export PYTHONPATH := tests
sanitize: $(BUILT) ## Core and extensions under ASan, UBSan, LSan and TSan (gcc)
	$(PY) -m prove --suite sanitizers $(PROVE_ARGS)

programs: export PYTHONPATH := tests
programs: $(BUILT) ## Fail tests/programs/ at 20 places each; rewrites docs/programs.md
	$(PY) -m programs

bench: $(BUILT) ## Measure what a healthy call costs
	$(PY) benchmarks/overhead.py

latency: $(BUILT) ## Measure the way from an error to its replay (about a minute)
	$(PY) benchmarks/latency.py --output benchmarks/results/latency-cpu.txt

peers: export OMP_NUM_THREADS = 1
peers: $(PEERS) ## Compare with other packages, in .venv-peers (about 25 minutes)
	.venv-peers/bin/python benchmarks/peers.py --output benchmarks/results/peers $(PEERS_ARGS)

ladder: export OMP_NUM_THREADS = 1
ladder: $(PEERS) ## Find the smallest budget that trains, in .venv-peers (about 15 minutes)
	.venv-peers/bin/python benchmarks/ladder.py --output benchmarks/results/ladder-cpu $(LADDER_ARGS)

larger: $(BUILT) ## Watch a model train that does not fit at micro-batch 1 (in larger-output/)
	$(PY) examples/larger_than_memory.py --output larger-output

tune: $(BUILT) .venv-optuna5/.installed ## Watch a search with Optuna survive out-of-memory (in tune_max-output/)
	PYTHONPATH=. .venv-optuna5/bin/python examples/tune_max.py --n-trials 20 --budget 300MiB

lint: $(BUILT) ## Formatters, linters and type checker; gcc and clang with -Werror
	.ci/lint $(VENV)/bin

gpu: export OOMKIT_REQUIRE_CUDA = 1
gpu: export PYTHONPATH := .
gpu: ## Build with PYTHON and its torch (no network, no .venv); run what needs a GPU
	rm -f $(BUILT)
	$(PYTHON) setup.py build_ext --inplace --force
	$(PYTHON) -m pytest tests/gpu tests/memory/test_memory.py -m gpu $(PYTEST_ARGS)
	set -e; for script in $(wildcard benchmarks/gpu/*.py); do $(PYTHON) $$script; done

clean: ## Remove what was built and measured; .venv stays
	rm -rf build dist demo-output larger-output tune_max-output *.egg-info .mypy_cache .ruff_cache .pytest_cache
	rm -f oomkit/*.so $(BUILT)
	find benchmarks csrc examples oomkit tests -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

.venv-%/.installed: requirements/search.txt requirements/integrations.txt \
    requirements/integrations-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r requirements/integrations-$*.txt
	touch $@

.venv-trainers/.installed .venv-trainers-lightning/.installed: \
    .venv-%/.installed: requirements/search.txt requirements/integrations.txt requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r requirements/$*.txt
	touch $@

$(BUILT): $(INSTALLED) $(SOURCES)
	$(PY) -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps --editable .
	touch $@

$(PEERS): requirements/peers.txt $(SOURCES)
	test -d .venv-peers || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r requirements/peers.txt
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --no-deps .
	touch $@
