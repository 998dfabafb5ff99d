# Every target sets itself up: the first use makes .venv and installs the project into it with its tools.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
NODE := examples/node/node_modules/.ready

.PHONY: run test lint protos bench sweep soak compose vm clean

run: $(READY)  ## a real command under a memory limit, in a pair of services of its own
	@PATH="$(BIN):$$PATH" examples/first_run.sh

test: $(READY) $(NODE)  ## every test, with a slice of the sweep
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## format, lint, types, import rules, protos, stubs, and no build output in git
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@PYTHON=$(BIN)/python tools/protos.sh --check
	@! git ls-files | grep -E '(^|/)(__pycache__|build|dist|\.venv|[^/]*\.egg-info)/|\.pyc$$' \
		|| { echo "the files above are build output: git rm --cached them" >&2; exit 1; }

protos: $(READY)  ## the stubs in clients/tightship/v1, made anew from protos/
	@PYTHON=$(BIN)/python tools/protos.sh

bench: $(READY)  ## launches against crun, and with traces against without; writes build/bench.json
	@rm -f build/bench.json; status=0; for each in launch tracing; do \
		$(BIN)/python -m tests.bench.$$each --output build/bench.json || status=1; done; exit $$status

sweep: $(READY)  ## every failpoint with every fault; writes build/sweep.json
	@$(BIN)/python -m tests.faults.sweep --output build/sweep.json

compose: $(READY)  ## the docker-compose rig: up, end-to-end tests, Incident A, restarts, down; as root on Debian
	@tests/compose/prepare
	@$(BIN)/python -m pytest tests/compose $(ARGS)

vm: $(READY)  ## the suite of limits on this machine, and in a QEMU guest that has cgroup v2 alone; as root on Debian
	@$(BIN)/python -m tests.vm.run

soak:
	@echo "make $@: not there yet" >&2
	@exit 2

clean:  ## what the other targets made
	rm -rf $(VENV) build

$(NODE): examples/node/package-lock.json
	@if ! command -v npm >/dev/null; then echo "npm is missing, and the Node example is not tested: apt-get install nodejs npm" >&2; \
	elif npm ci --prefix examples/node --ignore-scripts --no-audit --no-fund --silent; then touch $@; \
	else echo "npm can't get the modules of the Node example, which is not tested" >&2; fi

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
