# The commands of the house; `make` lists them. Everything runs in .venv, which `setup` makes.
PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup demo check test bench lock test-vllm test-train test-slurm-24

help:            ## list the commands
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

setup:           ## make .venv and what the sandbox needs
	@sh launch/bootstrap.sh

demo: setup      ## the main job: 64 sums x 4 rollouts by the tiny policy, into runs/demo
	@.venv/bin/rollmill experiment=demo

check: setup     ## lint, format, types, imports
	@.venv/bin/ruff check -q .
	@.venv/bin/ruff format --check -q .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache > .venv/lint-imports.log 2>&1 || { cat .venv/lint-imports.log; exit 1; }

test: check      ## everything: unit, integration, end to end, both sandboxes, a real Slurm
	@sh launch/bootstrap.sh test
	@$(PY) -P -m tests

bench: setup     ## every benchmark's JSON
	@for bench in $$(ls tests/bench | sed -n 's/^\([a-z_]*\)\.py$$/\1/p' | grep -v -e report -e __init__); do \
	  $(PY) -P -m tests.bench.$$bench --json || exit 1; done

lock: setup      ## compute requirements.lock anew from pyproject.toml
	@uv pip compile -q pyproject.toml --group dev --generate-hashes --no-emit-index-url --no-header -o requirements.lock

test-train: setup ## the reference trainer's gradients; needs torch in .venv: uv pip install --torch-backend cpu -e '.[train]'
	@$(PY) -P -c 'import torch, matplotlib' || { echo "test-train needs rollmill[train] in .venv; see docs/learning.md" >&2; exit 1; }
	@$(PY) -m pytest tests/train

test-slurm-24: setup  ## the Slurm tier on Debian trixie's 24.11, then once more on a controller that limits calls
	@sh launch/bootstrap.sh test
	@slurm=$$($(PY) -P -m tests.support.cluster.unpack trixie) && export ROLLMILL_TEST_SLURM=$$slurm && \
	  $(PY) -m pytest tests/slurm && \
	  ROLLMILL_TEST_SLURM_RATE_LIMIT=rl_bucket_size=40,rl_refill_rate=4 $(PY) -m pytest tests/slurm

test-vllm: setup ## real vLLM on CPUs in .venv-vllm (2.3 GB, installed here): the engines' suite, then a run on two servers
	@sh launch/vllm.sh
	@ROLLMILL_TEST_VLLM=$(CURDIR)/.venv-vllm/bin/python $(PY) -m pytest tests/vllm
