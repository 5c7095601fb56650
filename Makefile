# Every target sets up what it needs: a fresh machine has Python 3.11+ and Java 17, nothing more.
PYTHON ?= python3
BIN := .venv/bin
# uv is pinned where everything else is.
UV := $(shell sed -nE "s/^(uv==[0-9.]+).*/\1/p" requirements.lock)

# Where it is set, every process compiles all it imports, three seconds each.
unexport PYTHONDONTWRITEBYTECODE

# More than there are cores: many tests wait for processes. tests/fix_cluster.py has their order.
PARALLEL := --numprocesses 4 --dist loadgroup --no-loadscope-reorder
# The promise rests on two modules: these tests alone must take every branch of them.
COVERED := $(BIN)/pytest --quiet tests/unit/test_guarantee.py tests/unit/test_ledger.py --cov

# What wheels of avow-native are for, as zig names it: glibc from 2.17 on, musl from 1.2 on, macOS from 11 on.
TARGETS := x86_64-linux-gnu.2.17 aarch64-linux-gnu.2.17 x86_64-linux-musl aarch64-linux-musl \
    x86_64-macos.11.0 aarch64-macos.11.0
BUILD := $(BIN)/uv build --python $(BIN)/python --no-build-isolation --out-dir dist

.PHONY: help setup test test-all lint format lock docs bench dist up down clean demo

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.ready ## Make .venv from the lock, install avow into it, compile its C library, fetch jars, prepare Spark for quick starts
	@$(BIN)/python -m avow_native.build || echo "avow works without it, slower"
	@$(BIN)/avow setup

test: setup lint ## What CI runs: lint, then the tests on the real parts, four at a time, without the long ones
	$(COVERED)
	$(BIN)/pytest $(PARALLEL) -m "not long" --durations=40

test-all: setup lint ## The same with the long tests: whole plays, and more of what `make test` has one of
	$(COVERED)
	$(BIN)/pytest $(PARALLEL) --durations=40

lint: setup ## ruff, mypy --strict, and the one-way imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup ## Refresh requirements.lock and the jar lock to the newest versions allowed
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --python-version 3.11 \
	    --upgrade --all-extras --group dev pyproject.toml --output-file requirements.lock
	$(BIN)/python -m avow.local.jars lock

docs: setup ## Rewrite the generated parts of docs/ from the code's own tables
	$(BIN)/python docs/generate.py

demo: setup ## A pipeline killed again and again, then audited: make demo GUARANTEE=at-least-once
	$(BIN)/avow demo $(if $(GUARANTEE),--guarantee $(GUARANTEE)) $(if $(SINK),--sink $(SINK))

bench: setup ## avow and both its engines against what is possible at all and what others use, into PostgreSQL, Kafka and lakes: make bench N=2000000
	$(BIN)/python -m bench.postgres $(if $(N),--records $(N))
	$(BIN)/python -m bench.latency
	$(BIN)/python -m bench.kafka $(if $(N),--records $(N))
	$(BIN)/python -m bench.lake $(if $(N),--records $(N))

dist: setup ## Into dist/: the wheel and sdist of avow, the sdist of avow-native and its wheels for Linux and macOS
	rm -rf dist
	$(BUILD) .
	$(BUILD) --sdist native
	for target in $(TARGETS); do $(BUILD) --wheel --config-setting target=$$target native || exit 1; done

up: setup ## Start the local cluster: three Kafka nodes and PostgreSQL
	$(BIN)/avow up

down: setup ## Stop the local cluster
	$(BIN)/avow down

clean: ## Remove .venv, caches and dist/; the local cluster's data in .avow/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage dist

# Rebuilt only when the lock or the project's own metadata changes. Into .venv, whichever environment is active.
.venv/.ready: requirements.lock pyproject.toml native/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"avow needs Python 3.11 or newer, this is {v[0]}.{v[1]}: run make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(UV)
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable . --editable ./native
	@touch $@
