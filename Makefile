# `make train` and `make test` do all the set-up themselves: Python 3.10+, make and a C++ compiler are enough.
# Another torch gets an environment of its own: make test TORCH=torch==2.15.0 VENV=.venv-2.15 (docs/torch_versions.md).

PYTHON ?= $(shell python3 .ci/interpreter.py)
VENV ?= .venv
TORCH ?= torch==2.13.0
WORLD ?= 2
LANES ?= 2
ARGS ?=
PY := $(VENV)/bin/python
TYPED := build/typed/$(notdir $(VENV))
MYPY := $(VENV)/bin/mypy --cache-dir .mypy_cache/$(notdir $(VENV))

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-browser test-clients soak lint types unit bench docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

train: $(VENV)/installed  ## train a GPT on two ranks; options in ARGS, for example ARGS="--compare"
	$(PY) benchmarks/train.py --world $(WORLD) $(ARGS)

test: lint types unit  ## everything that CI runs

test-all: lint types  ## the same with all variants: before a release, and on each version of torch
	$(MAKE) unit ARGS="--all $(ARGS)"

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# mypy does not follow the mapping of passes/ into the package, so it gets a tree in which the mapping is real.
types: $(VENV)/installed
	rm -rf $(TYPED) && mkdir -p $(TYPED)/compiled_fsdp
	ln -s $(CURDIR)/compiled_fsdp/* $(TYPED)/compiled_fsdp/
	rm $(TYPED)/compiled_fsdp/passes.py && ln -s $(CURDIR)/passes $(TYPED)/compiled_fsdp/passes
	MYPYPATH=$(TYPED):benchmarks $(MYPY) -p compiled_fsdp
	MYPYPATH=$(TYPED):benchmarks $(MYPY) benchmarks

# Two lanes: while one waits, or runs what needs one process, the other has the cores. One thread in each
# process, as torchrun sets it: idle ones of OpenMP spin, which took a fifth of what needs one process.
unit: $(VENV)/installed
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(LANES) --dist worksteal $(ARGS)

test-browser: $(VENV)/installed  ## the report in headless Chromium: one on the path, CHROMIUM, or else the one that playwright fetches
	$(PY) -m pip install --quiet --editable ".[browser]"
	test -n "$$CHROMIUM" || command -v chromium-headless-shell chromium google-chrome || $(PY) -m playwright install --only-shell chromium
	$(PY) -m pytest tests/inspection/test_report_browser.py $(ARGS)

# In an environment of their own: these libraries are large, and must not change what the other tests run on.
test-clients: $(VENV)-clients/installed  ## Hugging Face models, PEFT, Lightning Fabric, torchtitan on sharded models; kernels in Triton's interpreter
	$(VENV)-clients/bin/python -m pytest tests/clients tests/test_examples.py $(ARGS)
	TRITON_INTERPRET=1 $(VENV)-clients/bin/python -m pytest tests/wire/test_codes.py $(ARGS)

soak: $(VENV)/installed  ## 2,000 steps of every kind beside the unsharded model
	PYTHONPATH=.:tests:benchmarks $(VENV)/bin/torchrun --nproc-per-node 2 tests/jobs/soak.py $(ARGS)

bench: $(VENV)/installed  ## all benchmarks; parts by ARGS="wire --rates 1", in small by ARGS=--quick; wire needs root
	$(PY) benchmarks/bench.py $(ARGS)

docs: $(VENV)/installed  ## the documents and the API as a site, in out/site
	$(PY) -m pip install --quiet --editable ".[docs]"
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going -c docs/site . out/site
	cp out/site/README.html out/site/index.html

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[test,bench,dev]"
	touch $@

$(VENV)-clients/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-clients/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)-clients/bin/python -m pip install --quiet "$(TORCH)" --editable ".[test,bench,clients]"
	touch $@

clean:
	rm -rf build out *.egg-info .mypy_cache .ruff_cache .pytest_cache
