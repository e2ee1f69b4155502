# Every target sets up what it needs in .venv; nothing else has to be installed but Python 3.10 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := constraints.txt
PYTHON_OLDEST ?= python3.10
TARGET ?= bayes-e
OUT ?= fxquant-demo
VENDOR ?= $(CURDIR)/.venv-vendor
PYTHON_VENDOR ?= python3.10

.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train, quantize, export and verify a small network (TARGET=bayes-e OUT=fxquant-demo)
	$(BIN)/python examples/demo.py --target $(TARGET) --out $(OUT)

# A file's tests stay in one process, where they share the models that they compile.
test: $(READY)  ## run the tests, but for those of the nightly lane
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 -q -m "not nightly or quick"

nightly: $(READY)  ## run random graphs, the zoo, several ranks, wheels, whole programs, pages that train, and the further cases of sweeps
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 -q -m nightly

quick: $(READY)  ## a choice of the tests that sees a break of any package; or all tests of one package (PACKAGE=ops)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q $(if $(PACKAGE),tests/$(PACKAGE),-m quick)

test-oldest:  ## the same with Python 3.10 and the oldest version of every dependency, in .venv-oldest (brings gigabytes of CUDA packages)
	$(MAKE) test PYTHON=$(PYTHON_OLDEST) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

vendor:  ## install the vendor's compiler and simulator for BPUs from PyPI into VENDOR (Python 3.10, x86-64 Linux, 1.1 GB)
	$(PYTHON_VENDOR) benchmarks/vendor/install.py $(VENDOR) --python $(PYTHON_VENDOR)

test-vendor: $(READY)  ## the tests that compile and simulate with it: export, compile, verify, estimate
	FXQUANT_HORIZON=$${FXQUANT_HORIZON:-$(VENDOR)} $(BIN)/python -m pytest -q -m vendor

check: lint types test  ## ruff, mypy and the tests

counts: $(READY)  ## write tests/counts/table.json again: kernels, fusions and nodes of small networks
	$(BIN)/python -m tests.counts.table

lint: $(READY)  ## ruff: rules, docstrings, complexity, format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/words.py
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/budget.py

types: $(READY)  ## mypy: strict over what the wheel would hold, and over the tests and benchmarks
	rm -rf build/types && mkdir -p build/types/fxquant
	ln -s $(CURDIR)/fxquant/* build/types/fxquant/
	ln -s $(CURDIR)/passes $(CURDIR)/backends build/types/fxquant/
	MYPYPATH=build/types:. $(BIN)/mypy build/types/fxquant tests benchmarks examples

bench: $(READY)  ## the benchmarks of speed (into benchmarks/RESULTS.md, which is not kept), exactness, operators and accuracy
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[accuracy,zoo]'
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.exactness --processes 2
	$(BIN)/python -m benchmarks.operators --target bayes-e nash-e bernoulli2 x86 --dtype int8 int16
	$(BIN)/python -m benchmarks.accuracy

real: $(READY)  ## measure pretrained networks again, and print what fell and rose since their table was kept; of wheels that are installed
	$(BIN)/python -m benchmarks.real.kept

real-keep: $(READY)  ## the same, and write the table benchmarks/real/kept.tsv anew
	$(BIN)/python -m benchmarks.real.kept --keep

docs: $(READY)  ## the documentation as a site, in build/docs/site; links that lead nowhere are errors
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	$(BIN)/python docs/site.py

stale:  ## list the measured figures of pages that are older than a change to what they rest on
	@$(PYTHON) docs/figures.py stale

clean:  ## remove what these targets made
	rm -rf $(VENV) .venv-oldest .venv-vendor build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis fxquant-demo

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fxquant needs Python 3.10 or later; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(READY)

.PHONY: help demo test nightly quick test-oldest vendor test-vendor check counts lint types bench real real-keep docs stale clean
