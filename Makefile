# All targets use .venv. `make setup` creates it once; the other targets call `make setup`.
PYTHON ?= python3.11
# The release of vllm-ascend with the matching vllm: a file in requirements/. Releases other than
# DEFAULT have separate environments.
DEFAULT := 0.23.0
VLLM_ASCEND ?= $(DEFAULT)
export VLLM_ASCEND
BIN := .venv$(addprefix -,$(filter-out $(DEFAULT),$(VLLM_ASCEND)))/bin
# Parallel test processes. Each file runs in one process, the longest files first (conftest.py). An
# e2e test has up to four emulated NPUs of 1 GiB.
WORKERS ?= 2
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30 $(LONG)
# `--long` adds the tests that `make test-all` runs.
LONG ?=
# Each emulated NPU is a process. More threads than cores would only wait for each other.
export OMP_NUM_THREADS ?= 1
# Some machines set this variable. Every process would then compile all sources again.
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

# The timeout stops a test that hangs after ten minutes. `--long` has the timeout of pyproject.toml.
ut: setup
	$(PYTEST) $(if $(LONG),,--timeout 600) tests/ut emulator

# `make matrix` reads the reports.
REPORTS := build/e2e
RUN := $(VLLM_ASCEND)$(if $(filter 1,$(VLLM_USE_V2_MODEL_RUNNER)),-v2)
e2e: setup
	$(PYTEST) --junitxml $(REPORTS)/$(RUN).xml tests/e2e

# Defects of upstream on this release: the table in docs/compatibility.md.
defects: setup
	$(PYTEST) --long -k "defect or upstream" tests/e2e

# Prints the duration of each part. `lint` uses one processor, so unit tests run at the same time.
test:
	@for part in setup "-j2 lint ut" e2e; do \
	  start=$$(date +%s); \
	  $(MAKE) --no-print-directory $$part || exit; \
	  echo "make $$part: $$(($$(date +%s) - start)) s"; \
	done

# The emulator's tests. `make ut` skips them if emulator, tests and pins have not changed since this
# target passed.
emulator: setup
	$(PYTEST) emulator/tests
	$(BIN)/python tests/depth.py

# Makes one mistake in the code at a time. A test must fail for each mistake. `make test-all` runs a
# tenth of the mistakes, another tenth each day.
mutants: setup
	$(BIN)/python tests/mutations/run.py $(MUTANTS)

# Engines and the demo on the other releases and on both model runners. LONG=--long adds tests of
# upstream's defects there, and takes hours.
OTHERS ?= 0.23.0.post1 0.26.0rc1 0.30.0rc2
V2 ?= 0.30.0rc2
releases:
	@for release in $(OTHERS); do $(MAKE) --no-print-directory VLLM_ASCEND=$$release e2e demo || exit; done
	@for release in $(V2); do \
	  VLLM_USE_V2_MODEL_RUNNER=1 $(MAKE) --no-print-directory VLLM_ASCEND=$$release e2e demo || exit; \
	done

# Writes the results of `make e2e` on each release into docs/compatibility.md.
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

# Builds the site in site/. A broken link or a page outside of the navigation is an error.
docs: setup
	@$(BIN)/python -m mkdocs build --strict

# Builds sdist and wheel of both distributions in dist/.
dist: setup
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m build --no-isolation --outdir dist emulator

clean:
	rm -rf .venv .venv-* .venv*.lock build dist site *.egg-info
