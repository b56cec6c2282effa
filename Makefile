# One entry for every task; CI calls the same targets. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt

# The last generator whose code has no check of versions: later ones refuse any older grpcio or protobuf, and a protobuf two
# major versions newer. It conflicts with mypy-protobuf, which makes the stubs, so it has an environment of its own; there
# are wheels of it for Python 3.11 and 3.12 (GENERATOR_PYTHON).
GENERATOR := $(VENV)/generator
GENERATOR_PYTHON ?= $(PYTHON)
GENERATOR_PACKAGES := grpcio-tools==1.62.3 setuptools==75.8.0
GENERATOR_PATH := $(CURDIR)/$(GENERATOR)/bin:$(CURDIR)/$(BIN)
PROTOS := $(shell cd protos && find rallypoint -name '*.proto' | sort)

.PHONY: help setup protos run demo lint test test-slow test-all test-torch wheel

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# The last prerequisite holds the version.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) services/rallypoint/serving/info.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

$(GENERATOR)/.ready: Makefile
	$(GENERATOR_PYTHON) -m venv --clear $(GENERATOR)
	$(GENERATOR)/bin/pip install --quiet $(GENERATOR_PACKAGES)
	touch $@

setup: $(VENV)/.ready ## make .venv with Rallypoint in it, editable, and everything that tests and lints it

protos: $(VENV)/.ready $(GENERATOR)/.ready ## generate the Python code of protos/
	PATH=$(GENERATOR_PATH):$$PATH .ci/generate-protos services etcd journal rendezvous server timer
	PATH=$(GENERATOR_PATH):$$PATH .ci/generate-protos agent agent

.PHONY: stubs
stubs: $(VENV)/.ready ## clients of protos/ in other languages, in build/stubs; compiles C++, C#, Go, Java, Rust, TypeScript
	.ci/make-stubs

.PHONY: run demo
run: $(VENV)/.ready ## train on digits: two services and two agents of two workers each, to the end
	$(BIN)/python examples/run_digits.py

demo: $(VENV)/.ready ## the same, broken piece by piece while it trains; ends with a timeline of the recoveries
	$(BIN)/python examples/demo.py

lint: $(VENV)/.ready $(GENERATOR)/.ready ## ruff, mypy strict, buf lint and breaking, generated code up to date, rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy services agent
	$(BIN)/mypy examples docker tests
	cd protos && ../$(BIN)/buf lint
	.ci/check-breaking
	.ci/check-drift
	$(BIN)/pytest -q tests/house

.PHONY: golden house
golden: $(VENV)/.ready ## rewrite tests/golden: help texts, contract, metrics, exit codes, public imports
	PYTHONPATH=tests $(BIN)/python -m golden

# ONLY=cycles shows the rules whose name matches, with the files behind them.
house: $(VENV)/.ready ## figures of the code's shape beside their limits and targets
	PYTHONPATH=tests $(BIN)/python -m house $(if $(ONLY),--only "$(ONLY)")

.PHONY: man
man: $(VENV)/.ready ## man pages of all commands, into build/man (`man -M build/man rallypoint-run`)
	$(BIN)/python .ci/man_pages.py build/man/man1

# Tests start hundreds of processes. Where PYTHONDONTWRITEBYTECODE is set, each of them would compile all sources again.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

# Four tests run at a time, because most of them wait; WORKERS=1 runs one at a time. ONLY=drain runs the tests whose names
# match. Without make: `.venv/bin/pytest tests/agent -m "not slow"`.
test: $(VENV)/.ready ## each property of the product, with short settings: some 5 minutes on two cores
	.ci/install-etcd
	$(BIN)/pytest -n $(or $(WORKERS),4) --dist worksteal -m "not slow" $(if $(ONLY),-k "$(ONLY)")

# Four at a time here too: these tests wait for most of their time.
test-slow: $(VENV)/.ready ## the tests that `make test` leaves out: long scenes and many seeds
	.ci/install-etcd
	$(BIN)/pytest -n $(or $(WORKERS),4) --dist worksteal -m slow $(if $(ONLY),-k "$(ONLY)")

test-all: ## test, test-slow and test-torch, one after the other
	$(MAKE) test
	$(MAKE) test-slow
	$(MAKE) test-torch

# SEED=123 replays one with its whole trace; SEEDS=10000 [FIRST=0] plays a range (docs/simulation.md).
.PHONY: simulate
simulate: $(VENV)/.ready ## simulated clusters with every kind of trouble: SEEDS=10000, or SEED=123 to replay one; HERD=1, JOINERS=1: other casts
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(HERD),--of herds) $(if $(JOINERS),--of joiners) $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

.PHONY: simulate-replicas
simulate-replicas: $(VENV)/.ready ## simulated replicas over a simulated etcd, with their nodes: SEEDS=10000, or SEED=123 to replay one
	PYTHONPATH=tests $(BIN)/python -m simulation --of replicas $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

.PHONY: simulate-timers
simulate-timers: $(VENV)/.ready ## simulated watchdogs, agents and workers that hang: SEEDS=10000, or SEED=123 to replay one
	PYTHONPATH=tests $(BIN)/python -m simulation --of timers $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

.PHONY: planted
planted: $(VENV)/.ready ## plant bugs in the product; print which seed of the simulations shows each; OF=timers: those of one kind
	for kind in $(or $(OF),clusters herds joiners timers replicas); do PYTHONPATH=tests $(BIN)/python -m simulation --of $$kind --planted; done

# SEED=7 sends others; SEED=7 ONLY=1234 sends that one alone, and shows the replies (docs/limits.md).
.PHONY: hostile
hostile: $(VENV)/.ready ## 100,000 malformed or hostile requests to a service: OF=timer, OF=agent, or rendezvous; COUNT=10000 sends fewer
	PYTHONPATH=tests $(BIN)/python -m hostile $(if $(OF),--of $(OF)) $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(ONLY),--only $(ONLY))

# ONLY=storm runs the tests whose name matches (docs/survival.md).
.PHONY: torture
torture: $(VENV)/.ready ## real servers killed, stalled, drained and cut off, at full length; prints figures
	RALLYPOINT_TORTURE=full $(BIN)/pytest -s tests/torture $(if $(ONLY),-k "$(ONLY)")

# ONLY=killed runs the tests whose name matches; MINUTES=10 instead of 30 of random trouble, SEED=7
# plays that again (docs/survival.md).
.PHONY: test-ha
test-ha: $(VENV)/.ready ## 3 replicas on 3 etcd members, killed, paused, parted and restarted, at full length; prints figures
	.ci/install-etcd
	RALLYPOINT_HA=full $(if $(MINUTES),RALLYPOINT_HA_MINUTES=$(MINUTES)) $(if $(SEED),RALLYPOINT_HA_SEED=$(SEED)) $(BIN)/pytest -s tests/ha $(if $(ONLY),-k "$(ONLY)")

# FROM=v0.1.0 is any revision; it is installed into build/revisions (docs/high-availability.md).
.PHONY: test-upgrade
test-upgrade: $(VENV)/.ready ## 3 replicas of the latest release, or of FROM=REVISION, replaced one by one under load, and back
	.ci/install-etcd
	old=$$(.ci/build-revision $(FROM)) && RALLYPOINT_UPGRADE_FROM=$$old $(BIN)/pytest -s tests/compat/upgrade.py

# SUITE=sid uses the etcd of that suite of this machine's distribution, and installs nothing.
.PHONY: test-etcd
test-etcd: $(VENV)/.ready ## the etcd tests, on another version of etcd: SUITE=trixie
	.ci/other-etcd $(or $(SUITE),trixie) build/etcd/$(or $(SUITE),trixie)
	RALLYPOINT_TEST_ETCD=$(CURDIR)/build/etcd/$(or $(SUITE),trixie)/usr/bin/etcd $(BIN)/pytest tests/etcd tests/rendezvous/journal

# TORCH_VERSION=2.14.1 uses that version, in an environment of its own.
USUAL_TORCH := 2.13.0
TORCH_VERSION := $(USUAL_TORCH)
TORCH := $(VENV)/torch$(if $(filter-out $(USUAL_TORCH),$(TORCH_VERSION)),-$(TORCH_VERSION))
$(TORCH)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(TORCH)/bin/python || $(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]' torch==$(TORCH_VERSION) \
	  accelerate lightning transformers
	touch $@

# ONLY=lost runs the tests whose name matches; with RALLYPOINT_TORTURE=full at full length (docs/survival.md).
test-torch: $(TORCH)/.ready ## torch tests, in their own environment
	$(TORCH)/bin/pytest -n $(or $(WORKERS),3) --dist loadfile -m torch $(if $(ONLY),-k "$(ONLY)")

# ISSUE=111646 shows one of them (docs/why-not-torchrun.md).
.PHONY: why-not-torchrun
why-not-torchrun: $(TORCH)/.ready ## reported defects of torchrun, under it and under Rallypoint; prints a table in some 10 minutes
	$(TORCH)/bin/python examples/why_not_torchrun.py $(ISSUE)

# ONLY=requeue plays one of them; TIMES=1 plays each once (docs/why-not-torchrun.md).
.PHONY: side-by-side
side-by-side: export PYTHONDONTWRITEBYTECODE :=
side-by-side: $(TORCH)/.ready ## first useful lines of torchrun and of Rallypoint when a script is missing, fails, reads stdin ...; prints a table
	PYTHONPATH=tests $(TORCH)/bin/python -m integration.torchrun_side_by_side $(ONLY) $(if $(TIMES),--times $(TIMES))

OLDEST := $(VENV)/oldest
$(OLDEST)/.ready: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed -n '/^dependencies/,/^]/s/.*"\(.*\)>=\(.*\)",/\1==\2/p' pyproject.toml >$(OLDEST)/floors.txt
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/floors.txt --editable '.[test]'
	touch $@

.PHONY: test-oldest
test-oldest: $(OLDEST)/.ready ## the contract, and jobs as a whole, with the oldest packages that pyproject.toml permits
	$(OLDEST)/bin/pytest -n $(or $(WORKERS),4) --dist worksteal -m "not slow" $(if $(ONLY),-k "$(ONLY)") \
	  tests/rpc tests/serving tests/rendezvous/api tests/rendezvous/test_client.py tests/timer/server tests/timer/client \
	  tests/agent/supervisor tests/conformance tests/integration/test_membership.py tests/integration/test_standalone.py \
	  tests/integration/test_worker_failures.py tests/integration/test_hangs.py

# Some minutes for every hundred: each worker of one of the three cases imports torch.
.PHONY: test-functions
test-functions: $(TORCH)/.ready ## N=1000 function workers on gloo: none fails after its function has returned; prints figures
	RALLYPOINT_FUNCTION_WORKERS=$(or $(N),1000) $(TORCH)/bin/pytest -s tests/torch_client/test_function_workers.py

.PHONY: elastic-loss
elastic-loss: $(TORCH)/.ready ## a DDP job loses an agent at a random step, N=20 times: same samples, same loss; prints a table
	RALLYPOINT_ELASTIC_LOSSES=$(or $(N),20) $(TORCH)/bin/pytest -s tests/examples/test_train_torch_elastic.py -k returns

.PHONY: test-clients
test-clients: $(VENV)/.ready ## build the example clients in C++, Go and TypeScript, and test them and the one in shell
	.ci/install-etcd
	.ci/make-clients
	RALLYPOINT_TEST_CLIENTS="cpp go node shell" $(BIN)/pytest -n $(or $(WORKERS),2) tests/clients $(if $(ONLY),-k "$(ONLY)")

.PHONY: first-hour
first-hour: $(VENV)/.ready ## rewrite docs/first-hour.md: type its commands into terminals of two hosts (root, tmux)
	PYTHONPATH=tests $(BIN)/python -m first_hour

.PHONY: bench
bench: $(VENV)/.ready ## figures beside their floors, also in bench.json; ONLY=rendezvous N=1024 narrows (docs/benchmarks.md)
	PYTHONPATH=tests $(BIN)/python -m benchmarks $(if $(ONLY),--only "$(ONLY)") $(if $(N),--n "$(N)") $(if $(TRIALS),--trials $(TRIALS))

# CONTRIBUTING.md describes a release.
.PHONY: release
release: $(VENV)/.ready ## write tests/released/VERSION, which later versions must be able to read: VERSION=0.1.0
	.ci/install-etcd
	PYTHONPATH=tests $(BIN)/python -m compat $(VERSION)

wheel: $(VENV)/.ready ## dist/rallypoint-*.whl, and dist/rallypoint_worker-*.whl for the environments of workers
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./worker

# --- Containers (docs/containers.md) --------------------------------------------------------------------
.PHONY: docker-base docker-test

build/docker/base.tar: docker/make-base
	docker/make-base $@

docker-base: build/docker/base.tar ## the image rallypoint-base:bookworm, from Debian's packages (root, debootstrap)
	docker import $< rallypoint-base:bookworm

docker-test: $(VENV)/.ready ## build the images and run the digits job in containers, with faults
	PIP=$(BIN)/pip timeout --kill-after=90 1800 docker/with-daemon $(BIN)/python docker/verify.py
