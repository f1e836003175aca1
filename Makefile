# Everything here works in .venv, which `make setup` (called by the others) makes once.
PYTHON ?= python3.11
# The release of vllm-ascend, with its vllm: a file in requirements/. Any other than DEFAULT has an environment of its own.
DEFAULT := 0.23.0
VLLM_ASCEND ?= $(DEFAULT)
export VLLM_ASCEND
BIN := .venv$(addprefix -,$(filter-out $(DEFAULT),$(VLLM_ASCEND)))/bin
# Tests that run at the same time, each file in one process, in the order of tests/conftest.py: longest
# first. An e2e test has up to four emulated NPUs of 1 GiB.
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30 $(LONG)
# `--long` adds the tests that `make test-all` runs.
LONG ?=
# Each emulated NPU is a process; more threads than cores only wait for each other.
export OMP_NUM_THREADS ?= 1
# Set on some machines: every process would compile our sources, and pytest rewrite its tests, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all releases matrix lint ut emulator e2e defects mutants benchmark docs dist clean

setup:
	@$(PYTHON) tools/setup_emulated.py

demo: setup
	@$(BIN)/hsx demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# A test that hangs ends in minutes here, not after the hour that three of them take otherwise.
ut: setup
	$(PYTEST) $(if $(LONG),,--timeout 600) tests/ut emulator/tests

# `make matrix` reads the reports.
REPORTS := build/e2e
RUN := $(VLLM_ASCEND)$(if $(filter 1,$(VLLM_USE_V2_MODEL_RUNNER)),-v2)
e2e: setup
	$(PYTEST) --junitxml $(REPORTS)/$(RUN).xml tests/e2e

# Defects of upstream on this release: the table in docs/compatibility.md.
defects: setup
	$(PYTEST) --long -k "defect or upstream" tests/e2e

# Each with the time that it took. `lint` uses one processor: unit tests run beside it.
test:
	@for part in setup "-j2 lint ut" e2e; do \
	  start=$$(date +%s); \
	  $(MAKE) --no-print-directory $$part || exit; \
	  echo "make $$part: $$(($$(date +%s) - start)) s"; \
	done

# The emulator's own tests; `make ut` runs them only if emulator, tests or pins have changed since this passed.
emulator: setup
	$(PYTEST) emulator/tests
	$(BIN)/python tests/depth.py

# Mistakes planted one at a time, each of which a test must notice; a tenth of them, another one each day, in `make test-all`.
mutants: setup
	$(BIN)/python tests/mutations/run.py $(MUTANTS)

# Engines and the demo on the other releases, which have environments of their own, and on both model
# runners. LONG=--long adds what upstream gets wrong there, and takes hours.
OTHERS ?= 0.23.0.post1 0.26.0rc1 0.30.0rc2
V2 ?= 0.30.0rc2
releases:
	@for release in $(OTHERS); do $(MAKE) --no-print-directory VLLM_ASCEND=$$release e2e demo || exit; done
	@for release in $(V2); do \
	  VLLM_USE_V2_MODEL_RUNNER=1 $(MAKE) --no-print-directory VLLM_ASCEND=$$release e2e demo || exit; \
	done

# Writes what passed on which release, by the reports of `make e2e`, into docs/compatibility.md.
matrix: setup
	$(BIN)/python tools/compatibility.py $(REPORTS)/*.xml

test-all: setup
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/test-all.txt
	$(MAKE) test LONG=--long
	$(MAKE) releases
	$(MAKE) mutants MUTANTS=--tenth

# Prints the tables and writes docs/performance.md, .json and .png.
benchmark: setup
	@$(BIN)/python -m benchmarks

# The site, into site/; a broken link or a page that is not in the navigation is an error.
docs: setup
	@$(BIN)/python -m mkdocs build --strict

# sdist and wheel of both distributions, into dist/.
dist: setup
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m build --no-isolation --outdir dist emulator

clean:
	rm -rf .venv .venv-* .venv*.lock build dist site *.egg-info
