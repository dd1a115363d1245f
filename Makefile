# `make` lists what there is. A target is here only once it does something.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# Given to pytest as it is: make test ARGS='-k ladder -x'
ARGS ?=
# The first interpreter that is new enough and can make an environment. Override: make venv PYTHON=/opt/python3.12/bin/python3
PYTHON ?= $(firstword $(shell for p in $$(type -ap python3 python3.13 python3.12 python3.11 python3.10) /usr/bin/python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p"; done))

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMP)  ## .venv with everything that the lock names, and this checkout in it (editable)

# --no-build-isolation: the build backend comes from the lock, too, and building this checkout asks no network.
$(STAMP): requirements.lock pyproject.toml watchdog/slurm_watchdog/__init__.py
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python >= 3.10 that can make a virtual environment was found." >&2; \
		echo "On Debian and Ubuntu: apt-get install python3-venv, then try again; or: make venv PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi
	@if ! [ -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "$(VENV) from $(PYTHON)"; rm -rf $(VENV); "$(PYTHON)" -m venv $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: lock
lock:  ## requirements.lock again, from pyproject.toml (newest versions that fit; UPGRADE= keeps the pinned ones)
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	"$(PYTHON)" -m venv "$$tmp" && "$$tmp/bin/pip" install --quiet --disable-pip-version-check uv && \
	"$$tmp/bin/uv" pip compile --quiet $(UPGRADE) --universal --python-version 3.10 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --no-header --no-annotate --extra controller --extra dev \
		pyproject.toml -o requirements.lock; \
	! grep -n '://' requirements.lock
UPGRADE ?= --upgrade

.PHONY: example
example: $(STAMP)  ## config.example.yaml again, from the schema in watchdog/slurm_watchdog/config/schema.py
	$(BIN)/python -m tools.docs example

.PHONY: docs
docs: $(STAMP)  ## the pages that are generated from the program, with the examples in README.md (ARGS='options cli' for some)
	$(BIN)/python -m tools.docs $(ARGS)

.PHONY: options metrics rooms
options metrics rooms: $(STAMP)
	$(BIN)/python -m tools.docs $@

# What is packed is what the lock has put into .venv: no network is asked. KINDS: wheel sdist hooks archive deb rpm.
.PHONY: package
package: $(STAMP)  ## wheel, sdist, relocatable environment, .deb and .rpm (where the tools are) in dist/ (KINDS='deb')
	$(BIN)/python -m tools.packaging $(KINDS)
KINDS ?=

.PHONY: lint
lint: $(STAMP)  ## ruff (lint, format), mypy, and nothing that Python 3.10 lacks; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --target=3.10- --no-tips --violations $(LATER_PYTHON) watchdog tools deploy

# Asked for by name and done without where it is not there (compression.zstd: Python 3.14), or a word that vermin takes for another.
LATER_PYTHON := --exclude compression --exclude compression.zstd --exclude file

.PHONY: format
format: $(STAMP)  ## what ruff can put right by itself
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

.PHONY: packages
packages: $(STAMP)  ## Debian packages for the local Slurm (root); nothing to do if they are there
	$(BIN)/python -c "from tests.rig.debian_packages import ensure_packages; ensure_packages()"

.PHONY: packages-if-root
packages-if-root: $(STAMP)
	@if [ "$$(id -u)" = 0 ]; then \
		$(BIN)/python -c "from tests.rig.debian_packages import ensure_packages; ensure_packages()"; \
		if [[ "$${CI:-}" =~ ^(1|true)$$ ]]; then $(BIN)/python -m tests.integration.packages; fi; \
	else \
		echo "Not root: integration tests that need a local Slurm will be skipped, each with its reason."; \
	fi

.PHONY: demo
demo: packages  ## a real Slurm on this machine, a job that hangs, and what the watchdog does about it (KEEP=1 leaves it running)
	KEEP="$(KEEP)" $(BIN)/python -m deploy.demo

# Three parts: what needs nothing but the processor; live tests, which mostly wait, in workers that are a machine of their own
# each; and those live tests that need the whole machine. CONTRIBUTING.md says which is which. With four processors the first two
# run at the same time, and what the second one says comes after it. With two that saved a fifth of the time, and tests of
# either kind failed since they waited for the processor.
# SLURM: a prefix or a root directory with another release; the head of tests/other_slurm.sh says how to make one.
.PHONY: test
ifneq ($(strip $(SLURM)),)
test: $(STAMP)
	bash tests/other_slurm.sh "$(SLURM)" $(ARGS)
else
test: lint packages-if-root  ## lint, types and the tests of a quarter of an hour; the reason of each skip is printed (ARGS='-k ladder -x' for a part, SLURM=DIR for another release)
ifeq ($(strip $(ARGS)),)
	@$(BIN)/python -m compileall -q -j 2 --invalidation-mode checked-hash $(COMPILED)
	@mkdir -p build; rm -f $(RETRIED_TESTS); export RETRIED_TESTS=$(RETRIED_TESTS); code=0; \
	if [ "$$(nproc)" -ge 4 ]; then \
		$(LIVE_TESTS) > $(LIVE_OUTPUT) 2>&1 & live=$$!; trap 'kill $$live 2>/dev/null || true' EXIT; \
		env -u RETRIED_TESTS nice $(QUICK_TESTS) || code=$$?; \
		tail --lines=+1 --follow --pid=$$live $(LIVE_OUTPUT); wait $$live || code=$$?; \
	else \
		$(QUICK_TESTS) || code=$$?; \
		$(LIVE_TESTS) || code=$$?; \
	fi; \
	$(BIN)/python -m pytest $(RETRY) -m 'exclusive $(FAST)' $(LIVE) || code=$$?; \
	exit $$code
else
	$(BIN)/python -m pytest $(ARGS)
endif
endif
QUICK_TESTS = $(BIN)/python -m pytest -n 2 $(SPREAD) -m 'not exclusive $(FAST)' $(LIVE:%=--ignore=%)
LIVE_TESTS = $(LIMIT) $(BIN)/python -m pytest $(RETRY) $(WORKERS) -m 'not exclusive $(FAST)' $(LIVE)
LIVE := $(wildcard tests/integration tests/attacks)
LIVE_WORKERS ?= 5
WORKERS = --tx '$(LIVE_WORKERS)*popen//python=tests/own_namespaces.sh $(BIN)/python' $(SPREAD)
# tests/conftest.py says what goes to one worker together, and with what to begin.
SPREAD := --dist loadscope --no-loadscope-reorder
# Tests start some thousand interpreters; compiling the package in each of them takes 0.3 s (agent) to 1 s (controller),
# wherever PYTHONDONTWRITEBYTECODE is set. checked-hash: what was edited since is compiled again, whatever its time says.
COMPILED := watchdog deploy/demo tests tools hooks lab
FAST = and not thorough
# A live test depends on how busy the machine is: one that fails is run up to twice more, after a pause. More such
# tests than tests/conftest.py allows fail the run; it counts them over the parts, in this file.
RETRY := --reruns 2 --reruns-delay 5 -rR --durations=25 --durations-min=5
# CI ends everything after 90 min, without a word; what was found until then is printed if we end it ourselves.
LIMIT := timeout --foreground --kill-after=60 60m
RETRIED_TESTS := build/retried-tests
LIVE_OUTPUT := build/live-tests

# Before anything is called resolved: simulations, random worlds, properties at high counts, and long live scenes, too.
.PHONY: test-all
test-all: FAST =
test-all: test  ## `make test` with every test that is marked thorough (an hour of two slow cores)

.PHONY: check
check: lint  ## within two minutes: lint, types, and the tests of what was changed since main (FILES='watchdog/slurm_watchdog/…')
	$(BIN)/python -m tools.changed $(FILES) | xargs $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not thorough'
FILES ?=

# Not in the lock, and no part of `make test`: some GB, and what is tested is their newest releases.
.PHONY: trainers
trainers: $(STAMP)  ## slurm_watchdog_hooks in the real frameworks (installs PyTorch, transformers, Lightning, DeepSpeed: some GB)
	[ -x .venv-trainers/bin/python ] || "$(PYTHON)" -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet --disable-pip-version-check torch numpy transformers accelerate lightning
	.venv-trainers/bin/python -m pip install --quiet --disable-pip-version-check deepspeed
	TRAINERS_PYTHON="$(CURDIR)/.venv-trainers/bin/python" $(BIN)/python -m pytest tests/trainers $(ARGS)

# The same of real trainings that hang, die, save and evaluate. Composer wants an older PyTorch, and runs with this one.
.PHONY: frameworks
frameworks: $(STAMP)  ## seventeen real trainings, each with eight faults, under `slurm-watchdog run`: a line of JSON a case (some GB, hours; ARGS='keras --write')
	[ -x .venv-frameworks/bin/python ] || "$(PYTHON)" -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -r lab/frameworks/requirements.txt
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check --no-deps mosaicml
	$(BIN)/python -m lab.frameworks $(ARGS)

.PHONY: hostile
hostile: $(STAMP)  ## 100,000 strings that are meant to harm through Slack, terminal, metrics and the page in Chromium (ARGS=5000 for fewer)
	$(BIN)/python -m tests.hostile $(ARGS)

# No part of `make test`: it takes its time, for every threshold is as shipped. LIVE_PYTHON is another interpreter that has torch.
.PHONY: live
live: packages  ## real PyTorch jobs on a real Slurm, broken and healthy, and nodes that fail: a line of JSON a figure (root; ARGS='lock healthy')
	if [ -z "$${LIVE_PYTHON:-}" ]; then \
		[ -x .venv-live/bin/python ] || "$(PYTHON)" -m venv .venv-live; \
		.venv-live/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy || rm -rf .venv-live; \
	fi
	$(BIN)/python -m lab.live $(ARGS)

# NVRx apart, by its newest wheel for this Python: it is marked for a newer C library than many machines have, for the sake of
# one module that needs a GPU.
.PHONY: compare
compare: packages  ## torchrun, NVRx, DLRover and a log-age script with the same faults on a real Slurm: a line of JSON an outcome (root; ARGS='killed --peers nvrx')
	if [ ! -x .venv-compare/bin/python ]; then \
		"$(PYTHON)" -m venv .venv-compare && .venv-compare/bin/python -m pip install --quiet -r lab/compare/requirements.txt && \
		.venv-compare/bin/python -m pip install --quiet --no-deps --only-binary=:all: --platform manylinux_2_39_x86_64 --upgrade \
			--target "$$(.venv-compare/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" nvidia-resiliency-ext \
			|| rm -rf .venv-compare; \
	fi
	$(BIN)/python -m lab.compare $(ARGS)

.PHONY: grafana
grafana: $(STAMP)  ## deploy/grafana/dashboards again, from generate.py
	$(BIN)/python -m tools.docs.grafana

.PHONY: bench
bench: $(STAMP)  ## what the agent costs, beside its peers: a line of JSON a figure (root; ARGS='agent logs' for parts, ARGS=--help)
	$(BIN)/python -m lab.bench $(ARGS)

.PHONY: soak
soak: packages  ## random faults on a real Slurm with a watchdog that acts, for MINUTES=n, and what came of it by the history checker (root)
	$(BIN)/python -m lab.soak --minutes $(MINUTES) $(ARGS)

.PHONY: soak-agent
soak-agent: $(STAMP)  ## floods, a driver that hangs and a day of ticks, for MINUTES=n: memory, descriptors and threads must not grow (root)
	$(BIN)/python -m lab.bench soak --minutes $(MINUTES)
MINUTES ?= 30

.PHONY: fuzz
fuzz: $(STAMP)  ## N bodies that no agent would send, through the controller's door and all behind it (15 min a million; SEED=n)
	$(BIN)/python -m tests.fuzz.dumps 900000 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz $(N) $(if $(SEED),--seed $(SEED))
N ?= 1000000
SEED ?=

.PHONY: crash-points
crash-points: $(STAMP)  ## 10,000 deaths of the controller in the middle of actions, 10,000 of two controllers, 1,000 kill switches, simulated
	$(BIN)/python -m tests.simulation --crash-points 0-$(POINTS)
	$(BIN)/python -m tests.simulation --failovers 0-$(POINTS)
	$(BIN)/python -m tests.simulation --cycles 0-$$(($(POINTS) / 10))
POINTS ?= 10000

.PHONY: failover
failover: packages  ## two controllers on a PostgreSQL and a real Slurm, both killed in the middle of an action (root; apt-get install postgresql)
	$(BIN)/python -m pytest -s tests/integration/test_failover.py $(ARGS)

.PHONY: race
race: $(STAMP)  ## SWAPS=100000 links, renames and mounts against the children that read logs and write kill switches (root; minutes)
	$(BIN)/python -m lab.race --swaps $(SWAPS)
SWAPS ?= 100000

.PHONY: attack
attack: packages-if-root  ## every attack of tests/attacks on the build and with its defence taken out (root)
	$(BIN)/python -m pytest tests/attacks tests/unit/knowledge/test_linear_patterns.py tests/unit/controller/test_hostile_reports.py tests/unit/repository/test_security_page.py $(ARGS)

.PHONY: accuracy
accuracy: $(STAMP)  ## how well it judges: every case and 10,000 healthy job-hours, simulated (minutes; ARGS='case_05 healthy_day', ARGS=--help)
	$(BIN)/python -m tests.accuracy $(ARGS)

.PHONY: screenshots
screenshots: $(STAMP)  ## docs/images: the page over made-up data, in Chromium
	$(BIN)/python -m tests.page_screenshots

.PHONY: clean
clean:  ## removes the environment and what the tools left
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
