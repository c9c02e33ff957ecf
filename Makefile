# Every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
EXTRAS := test
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Figures of the paper and what goes with them.
FIGURES := fig2 fig5 fig6 fig7 fig8 fig9 scale simspeed
FIGURES += clipper_fig3 clipper_fig4 clipper_fig5 clipper_fig6
FIGURES += clipper_fig7 clipper_fig8 clipper_fig9 clipper_fig10
# The two pictures of README, simulated, in a minute.
FIGURES += overload lanes
# Live runs beside simulated ones: ten minutes on a machine with nothing else to do.
FIGURES += truth
# `edf_mh` beside `clockwork`, with each of its pieces off, and live beside simulated (likewise).
FIGURES += edf_mh edf_mh_cost ablation live_ranking

.PHONY: demo test test-long check bench experiments $(FIGURES) proto clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/python -m experiments demo

# Files of tests are shared out to so many processes; within a file the order stays, and so do its fixtures.
# Two for each of two cores, because tests wait a quarter of their time or more. By itself xdist would keep the files of few tests
# for the end, which are the longest, and whoever took the last one would be alone with it; tests/conftest.py says
# which come first.
JOBS := 4
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Where Python may not keep what it compiled, as in many images of containers, each of these processes would compile
# every source anew, and so would each of the servers, workers and commands that tests start.
unexport PYTHONDONTWRITEBYTECODE

test: check $(VENV)/kserve
	$(PYTEST)

# KServe's clients for their test, 17 MB, apart from what else .venv has; without them the test is skipped.
$(VENV)/kserve: tests/kserve.txt $(STAMP)
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps --no-compile \
	  --target $@ -r $< || { rm -rf $@; echo "KServe's client cannot be installed: its tests are skipped"; }

# Random tests with fresh examples, five times as many, and the tests that are too slow for `make test`.
# The seed is drawn where none is given; `make test-long SEED=...` draws the same again.
test-long: SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-long: $(STAMP) $(VENV)/kserve
	$(PYTEST) --long $(SEED)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(STAMP)
	$(BIN)/python -m experiments bench-serve
	$(BIN)/python -m experiments bench-selection
	@$(MAKE) --no-print-directory bench-live bench-controller

# What a live server promises its clients, in six minutes, and what broken workers cost, in four; on a machine
# with nothing else to do.
.PHONY: bench-promises bench-broken
bench-promises: $(STAMP)
	@$(BIN)/python -m experiments live_promises

bench-broken: $(STAMP)
	@$(BIN)/python -m experiments broken

# The processor as a whole device: goodput beside plain onnxruntime, predictions, memory of a second worker, in
# four minutes; on a machine with nothing else to do.
.PHONY: bench-cpu
bench-cpu: $(STAMP)
	@$(BIN)/python -m experiments bench-cpu

# Millions of broken messages for all that reads what comes from outside, in this process and over sockets: a
# quarter of an hour, or `make bench-fuzz MESSAGES=100000`.
MESSAGES = 10000000
.PHONY: bench-fuzz
bench-fuzz: $(STAMP)
	@$(BIN)/python -m experiments bench-fuzz --messages $(MESSAGES)

# What a request costs a live server, beside bare servers of grpcio, in three minutes; and how many requests one
# controller process answers in time, in eight. On a machine with nothing else to do, and with what `make native`
# made, where that is there.
NATIVE = $(if $(wildcard build/native),--native)
.PHONY: bench-live bench-controller bench-crowd
bench-live: $(STAMP)
	@$(BIN)/python -m experiments bench-live $(NATIVE)

bench-controller: $(STAMP)
	@$(BIN)/python -m experiments bench-controller $(NATIVE)

bench-crowd: $(STAMP)
	@$(BIN)/python -m experiments bench-crowd

# The paper's evaluation through a live server, two cores and modelled GPUs, beside the simulator: 25 minutes, or
# `make bench-paper-live PAPER_LIVE="--seconds 20 --warmup 5 --lines gpus6"`; on a machine with nothing else to do.
# Overload for ten minutes and a neighbour who floods: 30 minutes. What a request costs the controller, which the
# simulator charges: half a minute.
.PHONY: bench-paper-live bench-endurance bench-costs
bench-paper-live: $(STAMP)
	@$(BIN)/python -m experiments fig8_live $(if $(wildcard build/native),--native) $(PAPER_LIVE)

bench-endurance: $(STAMP)
	@$(BIN)/python -m experiments bench-endurance

bench-costs: $(STAMP)
	@$(BIN)/python -m experiments bench-controller-costs

# Each process killed, stopped and replaced 20 times under load: 15 minutes; on a machine with nothing else to do.
.PHONY: bench-restart
bench-restart: $(STAMP)
	@$(BIN)/python -m experiments bench-restart

# What keys, TLS and quotas cost a request; on a machine with nothing else to do.
.PHONY: bench-guard
bench-guard: $(STAMP)
	@$(BIN)/python -m experiments bench-guard

# What it costs to be observed: a scrape of 4,000 models, and a request with everything off and on; in four minutes,
# on a machine with nothing else to do.
.PHONY: bench-observe
bench-observe: $(STAMP)
	@$(BIN)/python -m experiments bench-observe

# An hour of churn: models, applications, clients and workers come and go, and each process keeps its size.
.PHONY: bench-soak
bench-soak: $(STAMP)
	@$(BIN)/python -m experiments bench-soak

# Models of all kinds, each asked while six other clients send outliers to it.
.PHONY: bench-mixing
bench-mixing: $(STAMP)
	$(BIN)/python -m experiments bench-mixing

# Every policy on workloads and faults that nobody tuned to, over three seeds; compiled (`make native`) it takes
# a third of the time.
.PHONY: bench-unseen
bench-unseen: $(STAMP)
	@$(BIN)/python -m experiments unseen

# Figures of the paper, each also alone; they leave JSON, CSV and PNG in experiments/results.
experiments: $(FIGURES) poisoned
	@$(BIN)/python -m experiments results_page

# The site of docs/, into build/site; a page or a link that is missing is an error. First what code says itself is
# written into the pages, of which a test looks whether it is what the code says.
.PHONY: docs
docs: $(STAMP)
	@$(BIN)/python -m docs.generated
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The page of all results, from their records; a test compares.
.PHONY: results-page
results-page: $(STAMP)
	@$(BIN)/python -m experiments results_page

# A live application whose best model is replaced by a bad version and then repaired.
.PHONY: poisoned
poisoned: $(STAMP)
	@$(BIN)/python -m experiments poisoned

$(FIGURES): $(STAMP)
	$(BIN)/python -m experiments $@

# The whole system on virtual time, with faults, in SEEDS random stories: a seed that fails is printed with its
# story. 10,000 take half an hour of two cores.
.PHONY: simulate-faults
SEEDS := 10000
simulate-faults: $(STAMP)
	@$(BIN)/python -m experiments simulate_faults --seeds $(SEEDS)

# Optional, for runs of hours: the simulator's inner loop and both cores compiled, in build/native.
.PHONY: native
native: $(STAMP)
	$(BIN)/python -m experiments.native

# Tests, benchmarks and figures on a GPU, in nine minutes; with none it says so and fails. In an environment of its
# own, .venv-gpu, with the torch of $(PYTHON) where that is 2.11 or later for CUDA 13 (SYSTEM_TORCH=1 insists, 0 refuses), else
# with one from a registry: gigabytes. The first run installs before the nine minutes begin. `make gpu GPU="--total-s 200"`.
# Without a GPU, `make gpu GPU=--rehearse` shows in five minutes that every part starts and ends, and nothing else.
.PHONY: gpu gpu-wheels
gpu:
	@SYSTEM_TORCH='$(SYSTEM_TORCH)' $(PYTHON) experiments/gpu/environment.py make
	@.venv-gpu/bin/python -m experiments.gpu $(GPU)

# What a host with torch for CUDA and without a registry lacks, into build/wheels, which then travels with the tree.
TARGET_PYTHON = $(shell $(PYTHON) -c 'import platform; print(platform.python_version().rpartition(".")[0])')
HAS := numpy scipy torch cuda-bindings onnx onnxruntime nvidia-ml-py
gpu-wheels:
	@$(PYTHON) experiments/gpu/environment.py wheels '$(TARGET_PYTHON)' $(HAS)

# The worker's code for GPUs on torch for CUDA without a GPU, on the oldest and the newest torch that pyproject.toml
# allows: gigabytes for each, so it is no part of `make test`.
REHEARSED := 2.11.0 2.14.1
.PHONY: gpu-rehearsal
gpu-rehearsal: $(STAMP) $(REHEARSED:%=.venv-gpu-torch%/.installed)
	$(BIN)/python -m pytest -q tests/worker/test_gpu_rehearsal.py
	@$(BIN)/python -m experiments gpu-ready

.venv-gpu-torch%/.installed: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing torch $* for CUDA into $(@D) (once)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$*' '.[cpu]' 'cuda-bindings>=13,<14'
	@$(@D)/bin/python -m pip uninstall --quiet --yes clockwright
	@touch $@

proto: $(STAMP)
	$(BIN)/python proto/generate.py

# What costs gigabytes, and what a host without a registry cannot fetch again, stays: .venv-gpu* and build/wheels.
clean:
	rm -rf $(VENV) $(filter-out build/wheels,$(wildcard build/*)) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
