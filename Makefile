# Every target installs its requirements in .venv. Nothing is installed outside the project's folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=
WORKDIR ?= .tuneline

.PHONY: images images-check hashes setup run flywheel test test-all test-cluster test-installation test-nfs test-gpu quality stress stress-training stress-deploy stress-launch stress-synthesis stress-flywheel bench-curation bench-fine-tuning bench-evaluation bench-explanation bench-reinforcement bench-estimates bench-gate bench-drift bench-cluster bench-gpu bench-serving bench-storage soak vllm-package lint docs dist ui clean help

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

# Install torch first and alone: otherwise, the resolver selects the newest CUDA build of several gigabytes.
$(VENV)/.ready: pyproject.toml constraints.txt embedded.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "tuneline needs Python 3.11 to 3.13; try make PYTHON=python3.11")'
	@echo "setting up $(VENV) (about 4 minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q -c constraints.txt torch
	@$(PIP) install -q -c constraints.txt -e '.[all,dev]'
	@$(PIP) install -q --no-deps --require-hashes -r embedded.txt
	@$(BIN)/python -m components.triton_packaging.serving_env || echo "Triton is not available: models will be packaged without a server test (see tuneline doctor)"
	@$(BIN)/python -m tests.reference --schemas
	@touch $@

setup: $(VENV)/.ready ## Create .venv with tuneline and its engines

run: $(VENV)/.ready ## Customize the embedded model on the demo dataset, end to end
	@$(BIN)/tuneline run --workdir $(WORKDIR) $(ARGS)

flywheel: $(VENV)/.ready ## Serve the demo model to simulated users, detect drift, train the next version on corrections, run it in shadow mode, and promote it (about 30 minutes)
	@$(BIN)/python -P -m examples.flywheel --folder $(WORKDIR)/flywheel $(ARGS)

# Most tests wait for child processes and servers, so use one worker more than cores, at most four.
WORKERS := $(shell cores=$$(nproc 2> /dev/null || echo 2); [ $$cores -lt 3 ] && echo $$((cores + 1)) || echo 4)
# Hundreds of child processes import tuneline; without its bytecode, each of them compiles it again.
PYTEST := PYTHONDONTWRITEBYTECODE= TUNELINE_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: lint ## Run ruff, mypy, the import contracts and the fast tests with one complete pipeline (21 minutes)
	@$(PYTEST) --ignore tests/engines $(ARGS)

$(VENV)/.engines: $(VENV)/.ready
	@$(PIP) install -q -c constraints.txt -e '.[all,dev,engines]'
	@touch $@

# Folder with the programs up, down, image and mkimage, which start a Kubernetes cluster on this machine (tests/engines/cluster.py).
CLUSTER_KIT ?= $(wildcard ../shared/cluster)
export TUNELINE_CLUSTER_KIT = $(abspath $(CLUSTER_KIT))
INSTALLATION_TESTS := $(patsubst %,tests/engines/test_%.py,installation verification_pod)
test-cluster: $(VENV)/.engines ## Run the tests in pods of a real Kubernetes cluster on one machine (root; CLUSTER_KIT=folder of the kit; 20 minutes)
	@$(PYTEST) -n 2 -m cluster tests/engines $(addprefix --ignore=,$(INSTALLATION_TESTS)) $(ARGS)

test-installation: $(VENV)/.engines ## Follow docs/how-to/install.md on such a cluster with a second node, up to a served model; run its CronJobs; upgrade, roll back and drain a node under traffic; restore the backup; run an image of `make images` (root, buildah; 20 minutes)
	@$(PYTEST) -n 0 -m cluster $(INSTALLATION_TESTS) $(ARGS)

# Folder with the program nfs-lab, which starts an NFS server and two clients on this machine (tests/engines/test_nfs.py).
NFS_KIT ?= $(wildcard ../shared/nfs-lab)
test-nfs: $(VENV)/.ready ## Run the tests on NFS between three machines (root; NFS_KIT=folder of the kit; 35 minutes)
	@TUNELINE_NFS_LAB=$(abspath $(NFS_KIT)) $(PYTEST) -n 0 -m nfs tests/engines $(ARGS)

# Tests of a missing engine are skipped; with TUNELINE_ENGINES=required, as in CI, they fail.
# Tests against engines mostly wait while other tests compute, so run more workers than cores.
test-all: lint $(VENV)/.engines ## Run the fast and the long tests: kills, full disks, stopped servers, the commands of the README, real engines (60 minutes)
	@$(PYTEST) -n 4 -m "not stress and not gpu" $(ARGS)

quality: $(VENV)/.ready ## Print the code metrics with their targets
	@$(BIN)/python -m tests.quality $(ARGS)

# The files of the targets below; `stress` runs the other tests of its tier.
STRESS_ELSEWHERE := stress/test_training_kills.py $(patsubst %,fine_tuning/test_%.py,distributed resume sweep trainjob) pipelines/test_deployment.py pipelines/synthesis examples $(patsubst %,engines/test_%.py,ray_launcher slurm training_pods zero3)
stress: $(VENV)/.engines ## Kill and interrupt whole runs in each stage and at 30 random moments; restore a workdir and a server; resume a run and the demo after their budgets stopped them; test compiled stages, the commands of all pages and the examples (3 hours)
	@$(BIN)/python -m pytest -s -m "stress and not nfs and not cluster" tests $(addprefix --ignore=tests/,$(STRESS_ELSEWHERE)) $(ARGS)

stress-launch: $(VENV)/.engines ## Interrupt remote training: lost Ray nodes, a disturbed and a preempted TrainJob and RayJob, a stopped sweep; train the embedded model in a batch job (45 minutes)
	@TUNELINE_THREADS=1 $(BIN)/python -m pytest -m stress tests/engines/test_ray_launcher.py tests/engines/test_slurm.py tests/engines/test_training_pods.py tests/fine_tuning/test_trainjob.py tests/fine_tuning/test_sweep.py $(ARGS)

stress-training: $(VENV)/.engines ## Kill training runs of six recipes at 20 random moments each, and interrupt those of other recipes (20 minutes)
	@$(BIN)/python -m pytest -s -m stress tests/stress/test_training_kills.py tests/fine_tuning/test_distributed.py tests/fine_tuning/test_resume.py tests/engines/test_zero3.py $(ARGS)

stress-deploy: $(VENV)/.ready ## Make deployments fail (full disk, alias moved during a switch, external server); run a canary, promotions, a rollback and ten swaps under load (20 minutes)
	@TUNELINE_THREADS=1 $(BIN)/python -m pytest -s -m stress tests/pipelines/test_deployment.py $(ARGS)

stress-synthesis: $(VENV)/.ready ## Kill a synthesis run at 20 random moments, check its estimated time, and tune the embedded model on its rows (10 minutes)
	@$(BIN)/python -m pytest -s -m stress tests/pipelines/synthesis $(ARGS)

stress-flywheel: $(VENV)/.ready ## Kill examples/flywheel while it serves, and resume it; execute a notebook that customizes a model (45 minutes)
	@$(BIN)/python -m pytest -s -m stress tests/examples $(ARGS)

bench-curation: $(VENV)/.ready ## Compare data curation with other tools; curate a million rows (1 hour); writes docs/reference/benchmarks-curation.md
	@$(BIN)/python -P -m benchmarks.curation --workdir $(WORKDIR)/benchmark-curation --million --markdown docs/reference/benchmarks-curation.md $(ARGS)

bench-fine-tuning: $(VENV)/.ready ## Compare fine-tuning with TRL and LLaMA-Factory (30 minutes); writes docs/reference/benchmarks-fine-tuning.md
	@$(BIN)/python -P -m benchmarks.fine_tuning --workdir $(WORKDIR)/benchmark-fine-tuning --markdown docs/reference/benchmarks-fine-tuning.md $(ARGS)

bench-evaluation: $(VENV)/.ready ## Compare likelihood tasks with lm-eval, and an adapter with its base; DATA=folder of ICL files; writes docs/reference/benchmarks-evaluation.md
	@$(BIN)/python -P -m benchmarks.evaluation --data $(DATA) --workdir $(WORKDIR)/benchmark-evaluation --markdown docs/reference/benchmarks-evaluation.md $(ARGS)

GPU_TESTS := $(addprefix tests/,fine_tuning/test_varlen_attention.py fine_tuning/test_gpu_training.py triton_packaging/test_gpu_attention.py)
test-gpu: ## Run the tests that need an NVIDIA GPU with the interpreter PYTHON
	@PYTHONPATH=. $(PYTHON) -m pytest --noconftest -o addopts= -m gpu $(GPU_TESTS)

bench-gate: $(VENV)/.ready ## Simulate the promotion gate over 16 distributions (5 minutes); writes docs/reference/benchmarks-gate.md
	@OMP_NUM_THREADS=1 $(BIN)/python -P -m benchmarks.gate_simulation --markdown docs/reference/benchmarks-gate.md $(ARGS)

bench-drift: $(VENV)/.ready ## Simulate the drift check (10 minutes); ARGS="--far FILE --language FILE" selects other texts; writes docs/reference/benchmarks-drift.md
	@OMP_NUM_THREADS=1 $(BIN)/python -P -m benchmarks.drift_simulation --near numpy scipy sklearn --markdown docs/reference/benchmarks-drift.md $(ARGS)

bench-cluster: $(VENV)/.ready ## Emulate a shared cluster, and compare it with the simulator (4 minutes); writes docs/reference/cluster-emulation.md
	@OMP_NUM_THREADS=1 $(BIN)/python -P -m benchmarks.cluster_emulation $(ARGS)

bench-gpu: ## Measure training, serving and scoring on one NVIDIA GPU with the interpreter PYTHON; writes docs/reference/benchmarks-gpu.md
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --workdir $(WORKDIR)/benchmark-gpu --output $(WORKDIR)/benchmark-gpu/results $(ARGS)
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu.page $(WORKDIR)/benchmark-gpu/results/results.json --markdown docs/reference/benchmarks-gpu.md --commit $$(git describe --always --dirty)

bench-serving: $(VENV)/.ready ## Measure a served package with 1 to 16 clients (15 minutes; ARGS="--vllm-python PYTHON" compares it with vLLM); writes docs/reference/benchmarks-serving.md
	@$(BIN)/python -P -m benchmarks.serving --workdir $(WORKDIR)/benchmark-serving --markdown docs/reference/benchmarks-serving.md $(ARGS)

bench-explanation: $(VENV)/.ready ## Compare explanations with retraining on random halves and with the deletion of words (10 minutes); writes docs/reference/benchmarks-explanation.md
	@TUNELINE_THREADS=1 $(BIN)/python -P -m benchmarks.influence --markdown docs/reference/benchmarks-explanation.md $(ARGS)

bench-reinforcement: $(VENV)/.ready ## Train five tiny models with grpo after sft (30 minutes); writes docs/reference/benchmarks-reinforcement.md
	@TUNELINE_THREADS=1 $(BIN)/python -P -m benchmarks.reinforcement --workdir $(WORKDIR)/benchmark-reinforcement --markdown docs/reference/benchmarks-reinforcement.md $(ARGS)

bench-estimates: $(VENV)/.ready ## Compare dry runs with their runs on the embedded model (20 minutes); writes docs/reference/benchmarks-estimates.md
	@TUNELINE_THREADS=1 $(BIN)/python -P -m benchmarks.estimates --workdir $(WORKDIR)/benchmark-estimates --markdown docs/reference/benchmarks-estimates.md $(ARGS)

bench-storage: $(VENV)/.ready ## Compare the utilization that the storage benchmark measures with fio's (fio; root; 5 minutes); writes docs/reference/benchmarks-storage.md
	@$(BIN)/python -P -m benchmarks.storage_utilization --workdir $(WORKDIR)/benchmark-storage --markdown docs/reference/benchmarks-storage.md $(ARGS)

soak: $(VENV)/.ready ## Load a served package for an hour and record memory, latency and answers; writes docs/reference/soak.md
	@$(BIN)/python -P -m benchmarks.soak --workdir $(WORKDIR)/soak --markdown docs/reference/soak.md $(ARGS)

vllm-package: $(VENV)/.ready ## Serve a package of two adapters with vLLM; VLLM_PYTHON=interpreter of an environment with vLLM; writes docs/reference/vllm.md
	@$(BIN)/python -P -m benchmarks.vllm_package --vllm-python $(VLLM_PYTHON) --workdir $(WORKDIR)/vllm-package --markdown docs/reference/vllm.md $(ARGS)

# Variables: ENGINE, REGISTRY, TAG, IMAGES, BASE_IMAGE, ARGS; docs/how-to/images.md describes them.
images: ## Build the images of the pipeline steps with docker, podman or buildah
	@PYTHON=$(firstword $(wildcard $(BIN)/python) $(PYTHON)) sh images/build.sh

images-check: $(VENV)/.ready ## Build the curation image on a stand-in base image and run it with restricted permissions (root, buildah, mmdebstrap); writes docs/reference/images-check.md
	@$(BIN)/python -P -m images.check --workdir $(WORKDIR)/images-check --markdown docs/reference/images-check.md $(ARGS)

hashes: $(VENV)/.ready ## Write hashes.txt after a change of constraints.txt or pyproject.toml (package index; 10 seconds)
	@$(PIP) install -q -c constraints.txt uv
	@$(BIN)/python -P -m images.hashes

lint: $(VENV)/.ready ## Run ruff, mypy and import-linter; update the JSON schemas for editors
	@$(BIN)/python -m tests.reference --schemas
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

ui: $(VENV)/.ready ## Start the MLflow UI of the workdir on http://127.0.0.1:5000
	@umask o= && mkdir -p $(WORKDIR) && \
	$(BIN)/mlflow server --backend-store-uri sqlite:///$(abspath $(WORKDIR))/mlflow.db --host 127.0.0.1 --port 5000 --workers 1

docs: $(VENV)/.ready ## Build the documentation site in build/site without network access, with strict link checks (1 minute)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

dist: $(VENV)/.ready ## Build the wheel, the source distribution and the CycloneDX bill of materials of tuneline[all] in dist/
	@$(BIN)/python -P -m hatchling build --directory dist
	@$(BIN)/python -m images.sbom dist/tuneline.cdx.json

clean: ## Remove the virtual environment; keep the workdir
	rm -rf $(VENV)
