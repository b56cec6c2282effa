# One entry for every task; CI calls the same targets. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt

# The generator is pinned to the oldest grpcio-tools we support and lives in an environment of its own:
# generated code refuses any grpcio or protobuf older than its generator, and accepts every newer one.
GENERATOR := $(VENV)/generator
GENERATOR_PACKAGES := grpcio-tools==1.76.0 mypy-protobuf==5.1.0 protobuf==6.33.6
PROTOS := $(shell cd protos && find rallypoint -name '*.proto' | sort)

.PHONY: help setup protos

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

$(GENERATOR)/.ready: Makefile
	test -x $(GENERATOR)/bin/python || $(PYTHON) -m venv $(GENERATOR)
	$(GENERATOR)/bin/pip install --quiet $(GENERATOR_PACKAGES)
	touch $@

setup: $(VENV)/.ready ## make .venv with Rallypoint in it, editable, and everything that tests and lints it

protos: $(VENV)/.ready $(GENERATOR)/.ready ## generate the Python code of protos/
	PATH=$(CURDIR)/$(GENERATOR)/bin:$$PATH .ci/generate-protos services rendezvous timer
	PATH=$(CURDIR)/$(GENERATOR)/bin:$$PATH .ci/generate-protos agent agent
