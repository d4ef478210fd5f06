# Every target sets up what it needs; a machine needs Python 3.11 to 3.13 with pip, and make.
#   make run        a real workflow in a real ComfyUI, its text printed as it is written
#   make serve      ComfyUI with this pack, to open in a browser
#   make test       everything that a CPU can do: units, the real server, the real browser, real vLLM and llama.cpp
#   make test-fast  the units
#   make test-slow, test-vllm, test-compat   what takes minutes, a real vLLM server, the oldest transformers
#   make check      format, lint, types, docs in step
#   make docs       write what the documents take from the code
#   make bench      what is left of a bare loop's speed through the node, and rows of the real model with their ceiling
#   make gpu        the tests that need a GPU, with the python that has torch there
# Settings: PYTHON (which Python to use), ARGS (more arguments for pytest or the tool), COMFYUI_PATH (another ComfyUI),
# CHROMIUM (another browser).

.PHONY: run serve venv venv-test model test test-fast test-slow test-vllm test-compat check docs gpu bench clean
.DEFAULT_GOAL := run

PY := .venv/bin/python
SET_UP = @python=$$(sh tools/find_python.sh) && exec "$$python" -m tools.environment

run: model
	@$(PY) -m tools.run $(ARGS)

serve: model
	@$(PY) -m tools.run --serve

venv:
	$(SET_UP)

venv-test:
	$(SET_UP) test

model: venv
	@$(PY) -m tools.model

test: venv-test model
	@$(PY) -m tools.chromium
	@$(PY) -m tools.vllm_env
	@$(PY) -m pytest -m "not slow and not gpu" -rs --durations=15 $(ARGS)

test-fast: venv-test
	@$(PY) -m pytest -m "not server and not browser and not slow and not gpu and not vllm" $(ARGS)

test-slow: venv-test model
	$(SET_UP) quantised
	@$(PY) -m pytest -m "slow and not gpu and not vllm" -rs $(ARGS)
	@.venv-quantised/bin/python -m pytest -m slow tests/runtime/models/test_quantised.py -rs $(ARGS)

test-vllm: venv-test model
	@$(PY) -m tools.vllm_env
	@$(PY) -m pytest -m vllm -rs $(ARGS)

test-compat: model
	$(SET_UP) compat
	@.venv-compat/bin/python -m pytest tests/runtime/engines tests/runtime/test_engine_contract.py -m "not server and not browser and not slow and not gpu and not vllm" -rs $(ARGS)

check: venv-test
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m tools.check_types
	@$(PY) -m tools.docs --check

gpu:
	@$(or $(PYTHON),python3) -m pytest -m gpu -rs $(ARGS)

docs: venv
	@$(PY) -m tools.docs

bench: model
	@$(PY) -m tools.bench $(ARGS)
	@$(PY) -m runtime bench .build/models/SmolLM2-135M-Instruct --contexts 64,256 --output-tokens 32 --check \
		--json .build/bench-rows.json --plot .build/bench-rows.png

clean:
	rm -rf .venv .venv-compat .venv-quantised .venv-vllm .build .pytest_cache .ruff_cache .mypy_cache .hypothesis
