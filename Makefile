# `make demo` and `make test` set up all they need in .venv; nothing has to be there before but Python 3.10 or later. What the demo
# needs is a part of what the tests need.

PYTHON ?= python3
# A pinned torch keeps its download to one known wheel; override it for another build.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# With PACELINE_REQUIRE_ENGINES=1 the engines that tests use are installed, and a test skipped for want of one fails.
export PACELINE_REQUIRE_ENGINES

.PHONY: demo test check coverage lowest proof kube lint docs chaos bench compat engines clean gpu release

demo: .venv/.demo
	$(BIN)/python examples/digits/demo.py

# More processes than two cores: much of a test's time is waiting, for an engine or for a time-out.
test: .venv/.ready engines
	$(BIN)/python -m pytest -n 4

# The tests on a real Kubernetes, which it starts on this machine and takes down (docs/contributing/kubernetes.md): needs root and Go.
# `make kube KUBECONFIG=FILE` runs those that need no control of the nodes on another cluster, with `KUBE_IMAGE` in the pods.
# A KUBECONFIG of the environment doesn't count: nobody's cluster is used unasked.
kube: .venv/.ready
ifeq ($(origin KUBECONFIG),command line)
	PACELINE_KUBE='$(abspath $(KUBECONFIG))' PACELINE_KUBE_IMAGE='$(KUBE_IMAGE)' $(BIN)/python -m pytest tests/kube $(KUBE)
else
	@$(BIN)/python -m tests.kube.programs; code=$$?; \
	if [ $$code = 0 ]; then PACELINE_KUBE=here $(BIN)/python -m pytest tests/kube $(KUBE); \
	elif [ $$code != 77 ] || [ -n "$$PACELINE_REQUIRE_ENGINES" ]; then exit $$code; fi
endif

# A minute: the tests that start no process, in random order; `make check CHECK="-x tests/runs"` takes pytest's words.
check: .venv/.ready
	$(BIN)/python -m pytest --quick -p randomly -n 2 -q -r fE $(CHECK)

# How much of the source the quick tests run, in htmlcov/ and as one number. Lines that only other processes run count as missed.
coverage: .venv/.ready
	$(BIN)/python -m pytest --quick -n 2 -q -r fE --cov --cov-report html --cov-report term:skip-covered $(CHECK)

# The quick tests with the oldest versions of all packages that pyproject.toml allows, in an environment of their own.
LOWEST := .[torch,mpi,ray,kubernetes,s3,azure,gcs,sftp,http,keyring,notify,tabular,tune,serve,ui,mlflow,tensorboard,lowest]
lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade pip uv
	.venv-lowest/bin/python -m uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '$(LOWEST)'
	.venv-lowest/bin/python -m pytest --quick -n 2 -q -r fE $(CHECK)

# The full numbers of what `make test` does less often: kills, steps without growth, plans of collective operations; and the
# cells of matrices that it leaves out, which are marked `proof`.
proof: .venv/.ready engines chaos
	$(BIN)/python -m pip install --quiet accelerate lightning tensorboardX torchvision trackio transformers wandb '$(TORCH)'
	PACELINE_PROOF=1 PACELINE_REQUIRE_TRACKERS=1 $(BIN)/python -m pytest tests/trackers/test_libraries.py
	PACELINE_PROOF=1 PACELINE_ENDURANCE_STEPS=10000 PACELINE_PLANS=5000 \
	    $(BIN)/python -m pytest tests/collectives/test_endurance.py tests/collectives/test_properties.py --timeout 14400
	# Servers with the protocols of GCS and Azure. Go builds the first for minutes.
	$(BIN)/python -m pip install --quiet adlfs gcsfs
	GOBIN=$(CURDIR)/$(BIN) go install github.com/fsouza/fake-gcs-server@v1.56.1
	npm install --silent --no-save --prefix $(BIN)/../azurite azurite@3.35.0
	ln -sf ../azurite/node_modules/.bin/azurite-blob $(BIN)/azurite-blob
	# Some hours: 0.2 s of a core for each world.
	PACELINE_PROOF=1 PACELINE_WORLDS=100000 $(BIN)/python -m pytest tests/worlds
	PACELINE_PROOF=1 $(BIN)/python -m pytest -n 3 -m proof
	# A hundred losses of hosts: the better part of an hour.
	PACELINE_PROOF=1 PACELINE_LOSSES=100 $(BIN)/python -m pytest tests/engines/ssh/test_elastic.py -m proof
	# A hundred faults of a Kubernetes cluster: three hours.
	$(BIN)/python -m tests.kube.programs
	PACELINE_KUBE=here PACELINE_KUBE_FAULTS=100 $(BIN)/python -m pytest tests/kube/test_random_faults.py
	PACELINE_CHECKPOINT_KILLS=200 $(BIN)/python -m pytest tests/checkpoint/test_saving.py -k kills --timeout 7200
	# 3 GB of parameters on four workers of 5 GB each.
	PACELINE_PROOF=1 PACELINE_LARGE=1 $(BIN)/python -m pytest tests/parallel/large/test_limited.py --timeout 14400
	# All has passed: which engines that was with.
	$(BIN)/python .ci/engine_versions.py

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# With the modules and private names that tests replace. A cache of its own, because the options differ.
	$(BIN)/mypy --implicit-reexport --cache-dir .mypy_cache/tests tests
	# The examples, without the gaps of other packages' types.
	MYPYPATH=examples/parallel:examples/tutorials/digits $(BIN)/mypy --cache-dir .mypy_cache/examples --explicit-package-bases \
	    --untyped-calls-exclude=torch --no-warn-return-any --allow-untyped-decorators --ignore-missing-imports \
	    --disable-error-code var-annotated --disable-error-code import-untyped --exclude 'examples/azureml|score.py' examples
	$(BIN)/pyright

# The site, into site/. A dead link, a page that is not in the navigation, or a request to another host is an error.
# Not with --quiet, which would hide from --strict the warnings that it counts.
docs: .venv/.ready
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -q tests/docs/test_site.py tests/docs/test_search.py

# 500 kills of random processes in random states, 200 of a sweep's controller; `make test` does 4 and 3.
chaos: .venv/.ready
	PACELINE_PROOF=1 PACELINE_CHAOS_KILLS=500 PACELINE_SWEEP_KILLS=200 $(BIN)/python -m pytest tests/chaos --timeout 7200

bench: .venv/.ready
	for script in import_time first_line throughput log_rate get_metrics resubmit ignored_data list_runs \
	    layered_environment s3_download partition torch_mpi \
	    collectives hvd_allreduce hvd_tensors hvd_step \
	    parallel_speed first_check pipeline_bubble auto_choice \
	    first_line_elsewhere ends_elsewhere queued_submissions stacks sampling elastic checkpoint_stop \
	    sweep_overhead sweep_large sweep_stop_latency sweep_regret sweep_asha model_register serve_start serve_batching ui_pages azureml_names; do \
	  $(BIN)/python benchmarks/$$script.py || exit 1; done
	$(BIN)/python benchmarks/table.py

# Every strategy on one GPU, NCCL and Gloo, bf16, memory, the examples; without a GPU the same on the CPU.
gpu: .venv/.ready
	$(BIN)/python benchmarks/gpu.py

# Every torch and Python that is served, each in an environment of its own: hours, and gigabytes while it runs.
export COMPAT COMPAT_AT_ONCE
compat:
	$(PYTHON) .ci/compat.py

# All of a release but the upload: the archives in dist/, checked and tried. Then it prints what a person has to do.
release: .venv/.ready
	$(BIN)/python .ci/release.py build

engines:
	@if [ -n "$$PACELINE_REQUIRE_ENGINES" ]; then sh .ci/engines; fi

# A terminal gets pip's progress.
QUIET := $(shell [ -t 2 ] || echo --quiet)

.venv/.demo: pyproject.toml Makefile
	@echo "Setting up .venv with $(TORCH). On Linux pip takes the build for NVIDIA GPUs: 3 GB to download, 6.5 GB on disk, some minutes."
	@echo "It needs no GPU. For a smaller build: make demo TORCH=WHEEL, the file or address of a CPU wheel of torch (200 MB)."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(QUIET) uv '$(TORCH)'
	@echo "torch is installed. The packages of the demo come next."
	# uv takes a tenth of pip's time; pip knows the indexes of its own configuration. Both get the pin again: where other packages'
	# versions conflict at first, pip tries every release of torch, the newest first.
	$(BIN)/uv pip install $(QUIET) --python $(BIN)/python '$(TORCH)' --editable '.[torch,mpi,ui]' || \
	    $(BIN)/python -m pip install $(QUIET) '$(TORCH)' --editable '.[torch,mpi,ui]'
	touch .venv/.demo

.venv/.ready: .venv/.demo
	$(BIN)/python -m pip install $(QUIET) '$(TORCH)' --editable '.[torch,mpi,conda,ray,kubernetes,s3,sftp,http,notify,tabular,tune,serve,ui,mlflow,tensorboard,examples,dev]'
	touch .venv/.ready

clean:
	rm -rf .venv .paceline site dist .mypy_cache .ruff_cache .pytest_cache
