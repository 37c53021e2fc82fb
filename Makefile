# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SHARE  ?= 1

# The tests start hundreds of processes: each would compile all modules again if none of them kept its bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help run test test-all judges browser soak fuzz slurm hosts roots ray compat lock hooks check format docs bench container clean

help:            ## show the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

# What is needed to run. Modules are compiled when they are first loaded: most of them never are.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Paceline needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make run PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing Paceline and the packages that it runs with, torch above all: a minute or more, once"
	$(PIP) --no-compile -e .
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	@echo "installing what tests, checks and docs need besides, the extra 'dev' of pyproject.toml: a minute or more, once"
	$(PIP) -e '.[dev]'
	@touch $@

run: $(VENV)/ready  ## train a classifier of handwritten digits, data-parallel, and show what happened
	@$(BIN)/paceline train configs/digits.yaml --force

test: $(VENV)/ready-dev  ## run the tests
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

test-all: $(VENV)/ready-dev  ## run all tests, the exhaustive ones too
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slurm and not hosts and not ray" --hypothesis-profile=all

judges: $(VENV)/ready-dev  ## run other people's tests and catalogues against ours, all cases, and write docs/judges.md (minutes)
	$(BIN)/python scripts/judges.py

browser:         ## install Chromium, for the tests of the page (Debian, Ubuntu)
	@command -v chromium chromium-browser google-chrome >/dev/null || apt-get install -y --no-install-recommends chromium

soak: $(VENV)/ready-dev  ## inject faults into real processes, all of them, and write the record; SHARE=20: a 20th
	$(BIN)/python scripts/soak.py --share $(SHARE)

fuzz: $(VENV)/ready-dev  ## damaged and hostile input for everything that reads files, 10,000 of them, and write the record (minutes)
	$(BIN)/python scripts/fuzz.py --output bench/results/fuzz-cpu.json

slurm: $(VENV)/ready-dev  ## install and start a Slurm of four nodes on this machine, and run its tests (root; minutes)
	$(BIN)/python scripts/slurm_test_cluster.py -- $(BIN)/python -m pytest -q -m slurm tests/launch

hosts: $(VENV)/ready-dev  ## install sshd, start hosts in network namespaces, and run their tests with a short soak (root; minutes)
	@test -x /usr/sbin/sshd -a -x /usr/sbin/iptables || apt-get install -y --no-install-recommends openssh-server iptables
	$(BIN)/python -m pytest -q -m hosts tests/launch

roots: $(VENV)/ready-dev  ## docs/deployment.md and the nodes of infrastructure/ in clean roots of two distributions (root, debootstrap; minutes)
	$(BIN)/python -m pytest -q -n 0 -m hosts tests/infrastructure

ray: $(VENV)/ready-dev  ## install Ray apart, and run the tests on two Ray nodes of this machine (minutes)
	test -x $(VENV)/ray/bin/python || $(BIN)/python -m venv $(VENV)/ray
	$(VENV)/ray/bin/python -c "import pathlib, sysconfig; pathlib.Path(sysconfig.get_path('purelib'), 'paceline.pth').write_text('import site; site.addsitedir(%r)\n' % '$(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")')"
	$(VENV)/ray/bin/python -m pip install --quiet 'ray[train]>=2.40'
	$(VENV)/ray/bin/python -m pytest -q -n 0 -m ray tests/launch

compat: $(VENV)/ready-dev  ## run the tests with the oldest and with the newest packages that pyproject.toml allows, and write the record (an hour)
	$(BIN)/python scripts/compat.py

# torch for CPUs has an index of its own, whose hashes are not known here: locks/cpu.txt has all but torch and what it needs of CUDA.
LOCK = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate -c constraints.txt pyproject.toml
lock: $(VENV)/ready  ## write locks/cuda.txt and locks/cpu.txt: the exact packages to run with, and their hashes
	$(PIP) uv
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(LOCK) -o locks/cuda.txt
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(LOCK) -o locks/cpu.txt $$(grep -oE '^(nvidia|cuda|triton|torch)[a-z0-9-]*' locks/cuda.txt | grep -v nvidia-ml-py | sed 's/^/--no-emit-package /')

hooks:           ## have git run the quick checks before each commit
	git config core.hooksPath .githooks

check: $(VENV)/ready-dev  ## ruff, mypy --strict, bandit
	$(BIN)/ruff format --check src tests bench scripts
	$(BIN)/ruff check src tests bench scripts
	$(BIN)/mypy
	$(BIN)/bandit -q -c pyproject.toml -r src

format: $(VENV)/ready-dev  ## format and mend what can be mended
	$(BIN)/ruff format src tests bench scripts
	$(BIN)/ruff check --fix src tests bench scripts

docs: $(VENV)/ready-dev  ## build the docs as a book, offline, and print where it is; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -j auto -c docs -d build/doctrees . build/site
	@echo "$(CURDIR)/build/site/docs/index.html"

bench: $(VENV)/ready  ## time the engines beside their peers (minutes)
	$(BIN)/paceline bench engines

container:       ## build the image with docker, podman or buildah, and do `make run` in it; BASE=debootstrap without a registry
	scripts/build_container.sh

clean:           ## remove the virtual environment, caches and the built docs
	rm -rf $(VENV) build/site build/doctrees .pytest_cache .mypy_cache .ruff_cache .hypothesis
