# Every command builds its environment first: .venv, once, from requirements.lock.
# PYTHON=python3.12 picks the interpreter. pip's own variables (PIP_EXTRA_INDEX_URL, ...) work as usual.

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DVC_NO_ANALYTICS := 1

READY := .venv/.ready
SOURCES := src tests benchmarks

.PHONY: help reproduce extras environments crosscheck test lint bench lock clean

help:
	@echo "make reproduce  from nothing to every figure: the environment, then dvc repro (what is there stays)"
	@echo "make extras     other quantizers into .venv (AWQ, NF4): make reproduce then measures them too"
	@echo "make environments  auto-gptq and llmcompressor, which cannot live beside us, each into environments/<tool>/.venv"
	@echo "make crosscheck  our GPTQ against gptqmodel's, auto-gptq's and llmcompressor's; red ends it with one line"
	@echo "make test       the tests"
	@echo "make lint       style and the import rule"
	@echo "make bench      ours against peers, into benchmarks/results.json (wants a quiet machine)"
	@echo "make lock       resolve requirements.lock anew from pyproject.toml"
	@echo "make clean      remove the environment and caches (never data or results)"

reproduce: $(READY)
	.venv/bin/ptq-dynamics check
	.venv/bin/dvc repro

extras: .venv/.extras

.venv/.extras: $(READY)
	@.venv/bin/pip install -qq -c requirements.lock -e '.[gptqmodel,bnb,torchao]'
	@touch $@

environments: environments/auto-gptq/.venv/.ready environments/llmcompressor/.venv/.ready

# auto-gptq is built from source and imports torch meanwhile; its CUDA kernels are not wanted
environments/%/.venv/.ready: environments/%/requirements.txt
	@rm -rf $(@D)
	@$(find_python); echo "building $(@D) with $$("$$python" --version)"; "$$python" -m venv $(@D)
	@$(@D)/bin/pip install -qq wheel 'setuptools<80' $$(grep -E '^(torch|numpy)==' $<)
	@BUILD_CUDA_EXT=0 $(@D)/bin/pip install -qq --no-build-isolation -r $<
	@touch $@

# a pipeline of its own; it runs what of the main one it stands on
crosscheck: extras environments
	.venv/bin/dvc repro crosscheck/dvc.yaml

test: $(READY)
	.venv/bin/python -m pytest

lint: $(READY)
	.venv/bin/ruff check $(SOURCES)
	.venv/bin/ruff format --check $(SOURCES)
	.venv/bin/lint-imports --no-cache

bench: $(READY)
	.venv/bin/python benchmarks/training.py
	.venv/bin/python benchmarks/measure.py
	.venv/bin/python benchmarks/fanout.py
	.venv/bin/python benchmarks/curvature.py
	.venv/bin/python benchmarks/monitor.py
	.venv/bin/python benchmarks/quantizers.py

# Sets $$python to the first interpreter that pyproject.toml's requires-python admits.
define find_python
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11) none; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && break; \
done; \
if [ "$$python" = none ]; then \
	echo "make: no Python 3.11 to 3.14 found ($(or $(PYTHON),python3: $$(python3 --version 2>&1 | head -n 1))); install one, or name one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1; \
fi
endef

# From scratch each time, so that it is the lock's environment and never a mixture.
$(READY): requirements.lock pyproject.toml
	@rm -rf .venv
	@$(find_python); echo "building .venv with $$("$$python" --version) (240 packages, a few minutes)"; "$$python" -m venv .venv
	@.venv/bin/pip install -qq -r requirements.lock
	@.venv/bin/pip install -qq --no-deps -e .
	@touch $@

# Local version tags (+cpu) and the packages of torch's CUDA build belong to one machine and stay out. Lines with
# a condition on Python's version are pyproject.toml's.
lock:
	@rm -rf .tmp-lock
	@$(find_python); "$$python" -m venv .tmp-lock
	@.tmp-lock/bin/pip install -qq -e '.[dev]'
	@.tmp-lock/bin/pip check
	@sed -n 's/^ *"\(.*; python_version.*\)",$$/\1/p' pyproject.toml > .tmp-lock/conditional
	@.tmp-lock/bin/pip freeze --exclude-editable | sed 's/+.*//' \
		| grep -v -i -E "^(nvidia-|cuda-|triton==|$$(sed 's/==.*/==/' .tmp-lock/conditional | sort -u | paste -s -d '|' -))" \
		| cat .tmp-lock/conditional - | LC_ALL=C sort -f > .tmp-lock/pins
	@{ echo "# Everything that pyproject.toml's dependencies and its dev extra resolve to. Regenerate: make lock"; \
		cat .tmp-lock/pins; } > .tmp-lock/requirements.lock
	@mv .tmp-lock/requirements.lock requirements.lock
	@rm -rf .tmp-lock

clean:
	rm -rf .venv .tmp-lock .pytest_cache .ruff_cache .hypothesis src/*.egg-info
