# The way in for developers: `make help` lists every target.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Each target installs what it needs, by uv where that is installed (`make UV= demo`: by pip).
# Python compiles what is imported: to compile all of torch takes two thirds of an installation.
UV := $(shell command -v uv)
pip_of = $(if $(UV),$(UV) pip install --python $(1),$(1) -m pip install --no-compile --disable-pip-version-check)
# So the compiled files must be kept: without them each worker, and each program that a test starts,
# compiles all of torch that it imports.
unexport PYTHONDONTWRITEBYTECODE
NEEDS := build demo docs test dev
BUILT := $(VENV)/.built
PEERS := .venv-peers/.built
TRAINED := build/trained/.built
SOURCES := setup.py pyproject.toml \
    $(wildcard csrc/*/*.c csrc/*/*.h csrc/*/*.cpp csrc/*/*.map)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv build demo test quick ranks test-integrations test-sinks test-trainers
.PHONY: test-optimizers demo-trainers
.PHONY: prove mutants sanitize prove-trainers mutants-trainers
.PHONY: docs programs bench wheel latency peers ladder larger tune lint gpu clean

help: ## List every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.dev ## Create .venv with everything that any target here needs

build: $(BUILT) ## Build both extensions in place (again when a source changed)

demo: $(VENV)/.demo $(BUILT) ## Watch a training run survive out-of-memory (results in demo-output/)
	$(PY) examples/demo/demo.py --output demo-output

# Workers are processes of their own; what one of them changes in torch no other one sees.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal

test: $(VENV)/.test $(BUILT) ## Run the test suite; needs no GPU
	$(PY) -m pytest tests -m "not gpu and not whole" $(WORKERS) $(PYTEST_ARGS)

# Of folders of csrc whose tests have another name, for tests are imported: a module has this one.
TESTS_OF_types := python_types
TESTS_OF_tree := trees
TESTS_OF_py := errors
TESTS_OF_torch := bridge
TESTS_OF_module := package
quick: $(VENV)/.test $(BUILT) ## Run in a minute what a change needs first; FOLDER=undo for tests/undo, too
	$(PY) -m pytest tests/house tests/core tests/records tests/mutants \
	    $(foreach folder,$(FOLDER),tests/$(or $(TESTS_OF_$(folder)),$(folder))) $(WORKERS) $(PYTEST_ARGS)

ranks: $(VENV)/.test $(BUILT) ## Run all tests of several ranks, of which make test runs a sample (4 minutes)
	$(PY) -m pytest tests/ranks -m "not gpu" $(WORKERS) $(PYTEST_ARGS)

# One for each: Optuna 4 and 5 cannot live in one environment. oomkit is not installed there:
# .venv's build fits them, for Python and torch are the same. The documents' commands are run with
# Optuna 5, of which they show the output.
OPTUNAS ?= 5 4
INTEGRATIONS := tests/integrations
BLOCKS_5 := tests/docs/test_blocks.py
BLOCKS_4 := $(BLOCKS_5)::test_python
test-integrations: $(BUILT) .venv-optuna5/.installed .venv-optuna4/.installed ## Run the tests of other frameworks (the first time 5 minutes more)
	set -e; $(foreach version,$(OPTUNAS),PYTHONPATH=. .venv-optuna$(version)/bin/python -m pytest \
	    $(INTEGRATIONS) $(BLOCKS_$(version)) $(PYTEST_ARGS); )

test-sinks: $(BUILT) .venv-sinks/.installed ## Run the tests of loggers and notebooks (the first time 2 minutes more)
	PYTHONPATH=.:tests WANDB_MODE=offline .venv-sinks/bin/python -m pytest tests/sinks \
	    "tests/docs/test_blocks.py::test_python[docs/guides/reports.md]" $(PYTEST_ARGS)
test-optimizers: $(BUILT) .venv-optimizers/.installed ## Run the tests of optimizers of transformers, timm, bitsandbytes (the first time 1 minute more)
	PYTHONPATH=.:tests .venv-optimizers/bin/python -m pytest tests/ladder/test_known_optimizers.py \
	    $(PYTEST_ARGS)

# Two again: both sides pin libraries of their own.
test-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## Run the tests of trainers: transformers, TRL, Lightning, Ignite, accelerate (the first time 5 minutes more)
	set -e; for which in trainers trainers-lightning; do PYTHONPATH=. .venv-$$which/bin/python \
	    -m pytest tests/trainers tests/docs/test_blocks.py $(PYTEST_ARGS); done

demo-trainers: export OMP_NUM_THREADS = 1
demo-trainers: export PYTHONPATH = .
demo-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## Watch trainers survive out-of-memory: transformers, TRL, Lightning
	set -e; for mode in "" --plain; do \
	    for name in finetune_trainer dpo; do \
	        .venv-trainers/bin/python -W ignore examples/$$name.py $$mode; done; \
	    .venv-trainers-lightning/bin/python -W ignore examples/lightning_autobatch.py $$mode; done

prove: export PYTHONPATH := tests
prove: $(VENV)/.test $(BUILT) ## Fail allocations of every model in turn, and more (some hours; PROVE_ARGS=--rest runs what has not run on this commit)
	$(PY) -m prove $(PROVE_ARGS)

mutants: export PYTHONPATH := tests
mutants: $(VENV)/.test $(BUILT) ## Break one invariant at a time: tests must tell (under 30 minutes)
	$(PY) -m mutants $(MUTANTS_ARGS)

prove-trainers: export OOMKIT_TRAINER_POINTS = 0
prove-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## Fail every allocation of a call of each trainer (about 2 hours)
	set -e; for which in trainers trainers-lightning; do PYTHONPATH=. .venv-$$which/bin/python \
	    -m pytest tests/trainers -k "survive or known_shapes or leaves_the_run" \
	    --timeout=0 $(PYTEST_ARGS); done

mutants-trainers: $(BUILT) .venv-trainers/.installed .venv-trainers-lightning/.installed ## The same of trainers (about 10 minutes)
	set -e; PYTHONPATH=tests .venv-trainers/bin/python -m mutants --of trainers $(MUTANTS_ARGS); \
	    PYTHONPATH=tests .venv-trainers-lightning/bin/python -m mutants --of lightning \
	    $(MUTANTS_ARGS)

sanitize: export PYTHONPATH := tests
sanitize: $(VENV)/.test $(BUILT) ## Core and extensions under ASan, UBSan, LSan and TSan (gcc)
	$(PY) -m prove --suite sanitizers $(PROVE_ARGS)

programs: export PYTHONPATH := tests
programs: $(VENV)/.test $(BUILT) ## Fail tests/programs/ at 20 places each; rewrites docs/evidence/programs.md
	$(PY) -m programs

bench: $(TRAINED) ## Measure what a healthy call costs, in the build that wheels have
	PYTHONPATH=$(dir $(TRAINED)) $(PY) benchmarks/overhead.py

latency: $(VENV)/.demo $(BUILT) ## Measure the way from an error to its replay (about a minute)
	$(PY) benchmarks/latency.py --output benchmarks/results/latency-cpu.txt

peers: export OMP_NUM_THREADS = 1
peers: $(PEERS) ## Compare with other packages, in .venv-peers (about 25 minutes)
	.venv-peers/bin/python benchmarks/peers.py --output benchmarks/results/peers $(PEERS_ARGS)

ladder: export OMP_NUM_THREADS = 1
ladder: $(PEERS) ## Find the smallest budget that trains, in .venv-peers (about 15 minutes)
	.venv-peers/bin/python benchmarks/ladder.py --output benchmarks/results/ladder-cpu $(LADDER_ARGS)

larger: $(VENV)/.demo $(BUILT) ## Watch a model train that does not fit at micro-batch 1 (in larger-output/)
	$(PY) examples/larger_than_memory.py --output larger-output

tune: $(BUILT) .venv-optuna5/.installed ## Watch a search with Optuna survive out-of-memory (in tune_max-output/)
	PYTHONPATH=. .venv-optuna5/bin/python examples/tune_max.py --n-trials 20 --budget 300MiB

lint: $(VENV)/.dev $(BUILT) ## Formatters, linters and type checker; gcc and clang with -Werror
	.ci/lint $(VENV)/bin

docs: $(VENV)/.docs $(BUILT) ## Build the documentation, in build/docs (open index.html there)
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

wheel: ## Build dist/: sdist and a wheel for PYTHON, tried with each torch (WHEEL_ARGS)
	$(PYTHON) .ci/wheel.py $(WHEEL_ARGS)

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

$(PY):
	$(PYTHON) -m venv $(VENV)

# What is smaller is in what is larger. That of the build stays while no requirement has changed:
# with another one both extensions would be built again.
$(NEEDS:%=$(VENV)/.%): $(VENV)/.%: $(NEEDS:%=requirements/%.txt) | $(PY)
	$(call pip_of,$(PY)) -r requirements/$*.txt
	test -z "$$(find $^ -newer $(VENV)/.build 2>&1)" || touch $(VENV)/.build
	touch $@

.venv-sinks/.installed .venv-optimizers/.installed: .venv-%/.installed: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

.venv-%/.installed: requirements/search.txt requirements/integrations.txt \
    requirements/integrations-%.txt
	$(PYTHON) -m venv .venv-$*
	$(call pip_of,.venv-$*/bin/python) -r requirements/integrations-$*.txt
	touch $@

.venv-trainers/.installed .venv-trainers-lightning/.installed: \
    .venv-%/.installed: requirements/search.txt requirements/integrations.txt requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    -r requirements/$*.txt
	touch $@

$(BUILT): $(VENV)/.build $(SOURCES)
	@echo "Building both extensions: 50 seconds of one core"
	@CFLAGS="$${CFLAGS--g0}" CXXFLAGS="$${CXXFLAGS--g0}" $(call pip_of,$(PY)) --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(TRAINED): $(VENV)/.demo $(SOURCES) csrc/module/healthy.py $(shell find oomkit -name '*.py')
	@echo "Building both extensions as wheels have them: 90 seconds of one core"
	OOMKIT_TRAINED=1 CFLAGS="$${CFLAGS--g0}" CXXFLAGS="$${CXXFLAGS--g0}" \
	    $(PY) setup.py -q build --build-lib $(dir $(TRAINED))
	touch $@

$(PEERS): requirements/peers.txt $(SOURCES)
	test -d .venv-peers || $(PYTHON) -m venv .venv-peers
	$(call pip_of,.venv-peers/bin/python) -r requirements/peers.txt
	$(call pip_of,.venv-peers/bin/python) --no-build-isolation --no-deps .
	touch $@
