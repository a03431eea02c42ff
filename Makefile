# `make help` lists the targets. All but `train` run in .venv, which they create.

# PYTHON selects another environment: make test PYTHON=python3.13
VENV := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRAIN := $(VENV)-train
PEERS := $(VENV)/.peers
ENGINES := $(VENV)/.engines
COMPILERS := $(VENV)/.compilers
DOCS := $(VENV)/.docs
UV_VERSION := 0.13.8

# Python 3.11 or newer with venv, on the PATH or in pyenv; the first one that is here is used.
NEWEST := python3.14 python3.13 python3.12 python3.11 python3
OLDEST := python3.11 python3.12 python3.13 python3
HAS_VENV := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
runnable = $(shell for name in $(1); do \
	for python in $$name "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/$$name; do \
	"$$python" -c '$(HAS_VENV)' 2>/dev/null && echo "$$python" && exit; done; done)

# Modules are compiled once, not again in each of the thousands of processes that the tests start.
export PYTHONDONTWRITEBYTECODE :=

# Also appended to the command of `train`, `test`, `test-all`, `test-fast`, `chaos`, `gpu` and `lock`.
ARGS ?=

.PHONY: help train data peers engines compilers test test-fast test-changed test-all \
	test-everything test-reach oldest tier unpinned lowest chaos chaos-islands check bench gpu docs tutorials lock clean

help:
	@echo 'make train      set up, get the data, train LeNet on two devices (ARGS="--epochs 1")'
	@echo 'make test       every promise once, in minutes (PYTHON=python3.13, WORKERS=8)'
	@echo 'make test-fast  the quick ones, in half a minute'
	@echo 'make test-changed  those that reach what the working tree changed, in seconds'
	@echo 'make test-all   more combinations, real launchers and compilers; installs them'
	@echo 'make oldest     tests of what depends on JAX internals, on the oldest Python here'
	@echo 'make unpinned   these and `make test`, on the newest released jax'
	@echo 'make lowest     a smoke run on the lowest versions that pyproject.toml names'
	@echo 'make test-everything  all combinations, and the searches: hours'
	@echo 'make test-reach record which lines each test reaches, and what it costs'
	@echo 'make check      lint, formatting, types'
	@echo 'make chaos      inject faults into training runs (ARGS="--trials 1000")'
	@echo 'make chaos-islands  the same to runs of several islands (ARGS="--trials 1000")'
	@echo 'make bench      what Replicax costs over hand-written JAX'
	@echo 'make gpu        measure Replicax on this machine'\''s GPU, 8 minutes (ARGS="--only bits")'
	@echo 'make docs       build the documentation into build/site, readable without a network'
	@echo 'make tutorials  run the tutorials: what they print and draw goes into their pages and notebooks'
	@echo 'make data       install Fashion-MNIST from Debian if possible'
	@echo 'make peers      install torch and transformers, which `make test-all` compares with'
	@echo 'make engines    install Slurm, Open MPI and Ray, which `make test-all` runs under'
	@echo 'make compilers  install compilers for TPUs and GPUs, which `make test-all` plans with (3 GB)'
	@echo 'make lock       resolve the dependencies again (ARGS=--upgrade for the newest)'
	@echo 'make clean      remove all that these targets made, except runs/'

define environment
	$(eval FOUND := $(call runnable,$(or $(PYTHON),$(NEWEST))))
	@test -n "$(FOUND)" || { echo 'Replicax needs Python 3.11 or newer with its venv module' \
		'(Debian: apt-get install python3-venv); or name one: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	$(FOUND) -m venv --clear $(1)
endef

# Versions of the lock without hashes: with one, pip asks for hashes of every package.
constraints = sed -n 's/^\([a-z].*\) \\$$/\1/p' requirements.lock >$(1)/constraints.txt

$(STAMP): requirements.lock pyproject.toml
	$(call environment,$(VENV))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --editable .
	@: > $@

train: $(TRAIN)/.installed data
	$(TRAIN)/bin/replicax train lenet --devices 2 $(ARGS)

# What training needs, in the versions of the lock: half of its packages. Shows what takes long.
# Compiling all modules would take as long as the rest; those that are imported are compiled then.
$(TRAIN)/.installed: requirements.lock pyproject.toml
	$(call environment,$(TRAIN))
	@echo "train: getting the packages of replicax[all], 0.3 GB, for $(TRAIN), 0.9 GB"
	@$(call constraints,$(TRAIN))
	@$(TRAIN)/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off \
		--constraint $(TRAIN)/constraints.txt --editable '.[all]' | while read -r line; do \
		set -f; set -- $$line; case "$$line" in \
		*Downloading*[0-9][0-9].[0-9]' MB)') echo "train: $$line";; \
		'Installing collected packages:'*) \
			echo "train: installing $$(($$# - 3)) packages into $(TRAIN)";; \
		'Successfully installed'*) : > $@;; esac; done; test -e $@

FASHION_MNIST := /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz
INSTEAD := the recipe will download it or use 1,797 digits that come with Replicax

data:
	@if test -e $(FASHION_MNIST); then \
		echo "data: Fashion-MNIST is in $(dir $(FASHION_MNIST))"; \
	elif command -v apt-get >/dev/null && test "$$(id -u 2>/dev/null)" = 0; then \
		echo "data: installing Debian's package dataset-fashion-mnist"; \
		{ apt-get update && DEBIAN_FRONTEND=noninteractive \
			apt-get install --yes --no-install-recommends dataset-fashion-mnist; } \
			</dev/null >/dev/null 2>&1 \
			|| echo "data: that failed; $(INSTEAD)"; \
	else \
		echo "data: no Debian package can be installed here; $(INSTEAD)"; \
	fi

peers: $(PEERS)

$(PEERS): requirements-peers.txt $(STAMP)
	@echo "peers: installing $(shell sed '/^#/d' requirements-peers.txt)"
	@$(call constraints,$(VENV))
	@{ $(BIN)/python -m pip install --requirement requirements-peers.txt \
		--constraint $(VENV)/constraints.txt </dev/null >/dev/null 2>&1 && : > $@; } \
		|| echo 'peers: that failed; the tests that compare with them will be skipped'

ENGINE_PACKAGES := slurm-wlm munge openmpi-bin
SKIPPED := the tests that run under them will be skipped

# Debian's daemons are in sbin, which a PATH may lack.
engines: $(ENGINES)
	@export PATH="$$PATH:/usr/sbin:/sbin"; \
	if command -v srun >/dev/null && command -v munged >/dev/null && \
		command -v mpirun >/dev/null; then \
		echo "engines: $(ENGINE_PACKAGES) are installed"; \
	elif command -v apt-get >/dev/null && test "$$(id -u 2>/dev/null)" = 0; then \
		echo "engines: installing Debian's packages $(ENGINE_PACKAGES)"; \
		{ apt-get update && DEBIAN_FRONTEND=noninteractive \
			apt-get install --yes --no-install-recommends $(ENGINE_PACKAGES); } \
			</dev/null >/dev/null 2>&1 \
			|| echo "engines: that failed; $(SKIPPED)"; \
	else \
		echo "engines: no Debian package can be installed here; $(SKIPPED)"; \
	fi

$(ENGINES): requirements-engines.txt $(STAMP)
	@echo "engines: installing $(shell sed '/^#/d' requirements-engines.txt)"
	@$(call constraints,$(VENV))
	@{ $(BIN)/python -m pip install --requirement requirements-engines.txt \
		--constraint $(VENV)/constraints.txt </dev/null >/dev/null 2>&1 && : > $@; } \
		|| echo 'engines: that failed; $(SKIPPED)'

compilers: $(COMPILERS)

# In a folder on no path, since jax loads all compilers it finds; tests add it to the path.
$(COMPILERS): requirements-compilers.txt $(STAMP)
	@echo "compilers: installing $(shell sed -n 's/==.*//p' requirements-compilers.txt | uniq)"
	@rm -rf $(VENV)/compilers
	@{ $(BIN)/python -m pip install --no-deps --target $(VENV)/compilers \
		--requirement requirements-compilers.txt </dev/null >/dev/null 2>&1 && : > $@; } \
		|| echo 'compilers: that failed; the tests that plan with them will be skipped'

$(DOCS): requirements-docs.txt $(STAMP)
	@echo "docs: installing $(shell sed '/^#/d' requirements-docs.txt)"
	@$(call constraints,$(VENV))
	@{ $(BIN)/python -m pip install --requirement requirements-docs.txt \
		--constraint $(VENV)/constraints.txt </dev/null >/dev/null 2>&1 && : > $@; } \
		|| echo 'docs: that failed; the tests that build the site and run notebooks will be skipped'

# Without the warning about another major version of MkDocs.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open build/site/index.html'

tutorials: $(DOCS)
	$(BIN)/python docs/run_page.py docs/concepts.md docs/exact-mean.md docs/markers.md docs/from-*.md docs/tutorials/*.md --write
	$(BIN)/python docs/make_notebooks.py docs/tutorials/*.md

# Each worker takes up to 3 GB; one more than cores, as some tests wait for events.
WORKERS ?= 3
# A file runs in one worker, which makes its fixtures once; tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest -p support.times -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder
# Holds a whole run against tests/budget.json.
cost = $(if $(ARGS),,$(BIN)/python tests/support/cost.py $(1) --)

test: $(STAMP)
	$(call cost,test) $(PYTEST) -m "not exhaustive" $(ARGS)

test-fast: $(STAMP)
	$(call cost,test-fast) $(PYTEST) --fast -m "not exhaustive" $(ARGS)

test-changed: $(STAMP)
	$(BIN)/python tests/support/changed.py $(ARGS)

test-all: $(STAMP) data peers engines compilers $(DOCS)
	$(call cost,test-all) $(PYTEST) -m "exhaustive and not everything" $(ARGS)

test-everything: $(STAMP) data peers engines compilers $(DOCS)
	TEST_RANDOM=1 XLA_FLAGS= $(PYTEST) $(ARGS)
	$(BIN)/python benchmarks/exact_search.py

# Tests of code that depends on JAX internals.
TIER := tests/verify tests/plan tests/train/checkpoints tests/core/modes/exact tests/core/test_parity.py \
	tests/core/test_layout_parity.py tests/core/ground/test_jax_internals.py \
	tests/core/first_step/test_rows_*.py tests/known_wrong \
	--ignore tests/plan/test_plan_by_formula.py --ignore tests/plan/test_island_exchange.py \
	--ignore tests/plan/test_plan.py --ignore tests/verify/test_zoo_steps.py

oldest:
	$(MAKE) tier PYTHON=$(call runnable,$(OLDEST))

tier: $(STAMP)
	XLA_FLAGS= $(call cost,oldest) $(PYTEST) -m "not exhaustive" $(TIER) $(ARGS)

# The newest jax, whatever pyproject.toml and the lock say.
unpinned:
	$(call runnable,$(or $(PYTHON),$(NEWEST))) -m venv --clear .venv-unpinned
	.venv-unpinned/bin/python -m pip install --quiet --editable '.[dev]'
	.venv-unpinned/bin/python -m pip install --quiet --upgrade jax jaxlib
	$(MAKE) test tier BIN=.venv-unpinned/bin STAMP=.venv-unpinned/bin/python

# The lowest versions that pyproject.toml names. Old versions of other libraries use what is deprecated.
LOWEST := .venv-lowest/bin
SMOKE := tests/core/models tests/weights tests/train/test_resume.py tests/recipes/test_tokenizer.py

lowest:
	$(call runnable,$(or $(PYTHON),$(OLDEST))) -m venv --clear .venv-lowest
	$(LOWEST)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(LOWEST)/uv pip install --no-config --quiet --python .venv-lowest \
		--resolution lowest-direct --editable '.[all]'
	$(LOWEST)/uv pip install --no-config --quiet --python .venv-lowest \
		hypothesis pytest pytest-xdist
	$(LOWEST)/uv pip list --python .venv-lowest
	rm -rf build/lowest && mkdir -p build/lowest
	cd build/lowest && for recipe in mlp cnn gpt2; do \
		../../$(LOWEST)/replicax train $$recipe --steps 3 --eval-rows 256 --run $$recipe || exit; done
	cd build/lowest && ../../$(LOWEST)/replicax evaluate cnn
	cd build/lowest && ../../$(LOWEST)/replicax export mlp mlp.safetensors
	$(LOWEST)/python -m pytest -n $(WORKERS) --dist loadfile -m "not exhaustive" \
		-W ignore::DeprecationWarning $(SMOKE) $(ARGS)

# Takes Python 3.12 or newer. RUN names the record, for benchmarks/test_choice.py and mutations.py.
RUN ?= test
TESTS ?= --no-tiers -m "not exhaustive"

test-reach: $(STAMP)
	TEST_REACH_RUN=$(RUN) PYTHONPATH=tests $(PYTEST) -p support.reach $(TESTS) $(ARGS)

chaos: $(STAMP)
	$(BIN)/python tests/chaos/chaos.py $(ARGS)

chaos-islands: $(STAMP)
	$(BIN)/python tests/chaos/chaos.py --islands $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/zizmor --offline --quiet .github

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/lenet.py

# The lock has no jax with CUDA: GPU_PYTHON names a Python that has one.
GPU_PYTHON ?= $(BIN)/python

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	$(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

# One lock for Python 3.11 and newer: environment markers choose among the versions.
lock:
	$(call runnable,$(or $(PYTHON),$(NEWEST))) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	build/lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-config --custom-compile-command 'make lock' --quiet \
		--output-file requirements.lock $(ARGS)

clean:
	rm -rf .venv* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
