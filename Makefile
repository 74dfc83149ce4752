# make setup | make demo | make test-fast | make test | make test-docs | make test-device | make test-gpu [GPU=cuda] | make test-cluster | make test-slow | make lint | make bench | make bench-gpu
PYTHON ?= python3
# TORCH=2.15.0: that version of PyTorch, in an environment of its own
TORCH  ?=
VENV   := .venv$(addprefix -torch-,$(TORCH))
BIN    := $(VENV)/bin
USABLE := $(VENV)/.usable
READY  := $(VENV)/.ready
DOCS   := $(VENV)/.docs
# sources are compiled when they are first imported, which halves the time of installing
PIP    := $(BIN)/pip install --no-compile $(if $(TORCH),torch==$(TORCH),--constraint tools/constraints.txt)
RUN    := $(BIN)/mpiexec --oversubscribe --timeout
MPI_TESTS := $(BIN)/python -m pytest -p no:cacheprovider

# one thread per rank, and ranks that wait give up their core
export OMP_NUM_THREADS ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

# or each of the many processes that tests start would compile all sources anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-fast test-serial test-mpi test-docs test-device test-gpu test-cluster test-slow coverage mutants lint typecheck bench bench-gpu clean

# what running needs
$(USABLE): pyproject.toml
	@echo "installing spatialdl, PyTorch and an MPI into $(VENV): about a minute, and the time of downloads;"
	@echo "pip says nothing while it unpacks, which is half of it"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[mpi]"
	touch $(USABLE)

$(READY): $(USABLE)
	@echo "installing what the tests and checks need, too: about two minutes"
	$(PIP) --editable ".[mpi,dev,proof]"
	# apart, as programs of tests import torchvision before spatialdl, which fails beside a CPU build of
	# torch (see spatialdl/torchvision_operators.py); tests/vision.py makes both known to a test
	$(PIP) $(if $(TORCH),,--no-deps --target $(VENV)/vision) "timm>=1.0" "torchvision>=0.23"
	touch $(READY)

setup: $(READY)

demo: $(USABLE)
	$(BIN)/python examples/demo.py $(if $(SLIDES),--slides "$(SLIDES)")

# while one writes: boxes, plans, schedules, shards, slides, the rules of the source, and on two ranks
# operations on split images and whole layouts against one process; less than 90 s on two cores
FAST := $(addprefix tests/, layout spatial/random \
    $(addprefix spatial/, test_dims.py test_interpolation_weights.py test_one_rank.py test_recompute.py) \
    $(addprefix comm/, test_mesh.py test_plan.py test_dry.py) \
    $(addprefix pipeline/, test_schedule.py test_handovers.py test_simulate.py) \
    training/test_layouts.py \
    $(addprefix data/, test_format.py test_chunks.py test_folder.py) common/configuring/test_keys.py \
    $(addprefix slides/, reading/test_opening.py reading/test_reader.py cutting/test_tiling.py \
    finding/test_tissue.py) \
    test_contributing.py test_docs.py test_house.py common/test_text.py)
FAST_MPI := $(addprefix tests/mpi/, comm/test_repartition.py comm/test_reduce.py \
    $(addprefix spatial/, test_families.py test_norm.py test_recompute.py test_pool.py test_rearrange.py) \
    pipeline/test_front.py)

test-fast: $(READY)
	$(SERIAL) $(FAST)
	$(RUN) 300 -n 2 $(MPI_TESTS) -m "not slow" $(FAST_MPI)

test: test-serial test-mpi

# one more than cores, as many tests wait for processes that they start; the limit on restarts ends the run
# after a test that ran out of time, for which it would wait for ever
SERIAL := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not slow"
# programs and commands of README, pages and examples, as their readers run them
OF_DOCS := $(addprefix tests/, test_examples.py test_readme.py test_tutorial.py)
NOT_SERIAL := $(addprefix --ignore , tests/mpi tests/cluster tests/simulated_device $(OF_DOCS))

test-serial: $(READY)
	$(SERIAL) tests $(NOT_SERIAL)

test-docs: $(READY)
	$(SERIAL) $(OF_DOCS)

# what surrounds the split step, or is tried on each dim alone: two ranks show what four would
ON_TWO := $(addprefix tests/mpi/, benchmarks training/test_lightning.py \
    $(addprefix inference/, analysis evaluating features predicting/test_bag_run.py \
    predicting/test_results.py) \
    spatial/test_losses.py spatial/test_networks.py spatial/test_op_db.py \
    training/tasks/test_own_metrics.py)
test-mpi: $(READY)
	# operations that move pixels, on virtual tiles in one process; on four ranks: test-slow
	SPATIALDL_GRIDS=tiles $(MPI_TESTS) -m "tiles and not slow" tests/mpi/spatial

	$(RUN) 1800 -n 4 $(MPI_TESTS) -m "not slow" tests/mpi $(addprefix --ignore , $(ON_TWO))

	$(RUN) 1200 -n 2 $(MPI_TESTS) -m "not slow" $(ON_TWO) tests/mpi/comm/test_handover.py \
	    tests/mpi/fuzz tests/mpi/planning

	# layouts, messages and channels on three ranks, which divide nothing; layouts on two: test-device
	$(RUN) 600 -n 3 $(MPI_TESTS) -m "not slow" tests/mpi/pipeline/test_equal_numbers.py \
	    tests/mpi/spatial/channels tests/mpi/comm \
	    $(addprefix --ignore tests/mpi/, spatial/channels/test_networks.py spatial/channels/test_parallel.py \
	    comm/test_agreement.py comm/test_backend.py comm/test_processes.py comm/test_transport.py) \
	    $(addprefix tests/mpi/, $(addprefix pipeline/, test_state.py test_forward_state.py \
	    test_samples_apart.py test_sharded.py) training/test_not_finite.py training/test_staging.py \
	    training/tasks/test_task.py::test_parts_of_a_micro_batch_count_by_their_known_labels_in_float64)

# on a device, by each way in which its tensors travel: by nccl on one for each rank, by host and mpi
# all ranks on one; what a machine lacks for it is skipped with its reason. GPU=sim: the simulated one
GPU ?= cuda
RANKS ?= 2
ON_GPU := SPATIALDL_DEVICE=$(GPU) SPATIALDL_DEVICE_PATH
ON_SIM := SPATIALDL_DEVICE=sim SPATIALDL_DEVICE_PATH
BY_ALL_PATHS := tests/mpi/comm/test_device_transport.py tests/mpi/comm/test_reduce.py \
    tests/mpi/comm/test_repartition.py tests/mpi/comm/test_collectives.py
WITH_TESTS = $(RUN) 1200 -n $(RANKS) $(MPI_TESTS) -m "not slow" $(BY_ALL_PATHS)
ON_SHARED ?= tests/mpi/spatial tests/mpi/pipeline/test_equal_numbers.py tests/mpi/pipeline/test_host_waits.py

test-gpu: $(READY)
	$(ON_GPU)=nccl $(WITH_TESTS) tests/mpi/spatial tests/mpi/pipeline/test_host_waits.py \
	    tests/mpi/benchmarks tests/mpi/training/optimization \
	    tests/mpi/pipeline/test_sharded.py::test_an_optimizer_may_read_gradients_after_they_are_freed
	$(ON_GPU)=nccl $(RUN) 1200 -n $(RANKS) $(MPI_TESTS) -m "not slow" \
	    tests/mpi/pipeline/test_equal_numbers.py
	SPATIALDL_DEVICES=1 $(ON_GPU)=host $(WITH_TESTS) $(ON_SHARED)
	SPATIALDL_DEVICES=1 $(ON_GPU)=mpi $(WITH_TESTS) $(ON_SHARED)

# what is other than on a CPU: kernels and memory of a device, the ways of messages, streams that are
# late at random beside layouts of one network a family; everything on it is left to test-slow
ONE_OF_A_FAMILY := (not test_equal_numbers or odd or unet or vit-36 or resnet18-33x35) \
    and (not test_families or autocast)
test-device: $(READY)
	# in processes of its own: a device that is there is every test's accelerator
	$(BIN)/python -c "from tests.simulated_device import load, missing; missing() or load()"
	$(SERIAL) tests/simulated_device
	SIM_DELAY_US=20 $(ON_SIM)=nccl $(RUN) 1200 -n 2 $(MPI_TESTS) -m "not slow" \
	    -k "$(ONE_OF_A_FAMILY)" $(filter-out %/test_collectives.py, $(BY_ALL_PATHS)) \
	    tests/mpi/spatial/test_families.py tests/mpi/pipeline/test_host_waits.py \
	    tests/mpi/pipeline/test_equal_numbers.py \
	    tests/mpi/pipeline/test_sharded.py::test_an_optimizer_may_read_gradients_after_they_are_freed
	SPATIALDL_DEVICES=1 $(ON_SIM)=host $(RUN) 1200 -n 2 $(MPI_TESTS) -m "not slow" $(BY_ALL_PATHS) \
	    tests/mpi/pipeline/test_host_waits.py
	SPATIALDL_DEVICES=1 $(ON_SIM)=mpi $(RUN) 1200 -n 2 $(MPI_TESTS) -m "not slow" $(BY_ALL_PATHS)
	# virtual tiles, of which some wait on a disk while messages are packed in streams that are late
	SPATIALDL_DEVICES=1 SIM_DELAY_US=300 $(ON_SIM)=host $(RUN) 1200 -n 2 $(MPI_TESTS) -m "not slow" \
	    tests/mpi/training/test_virtual_tiles.py -k "segmentation and workers"

# feeding, checkpoints, half precision, sharded state, NaN, predictions
WHOLE_RUNS := tests/mpi/pipeline/test_autocast.py tests/mpi/pipeline/test_host_waits.py \
    tests/mpi/pipeline/test_sharded.py tests/mpi/inference/predicting/test_layouts.py \
    $(addprefix tests/mpi/training/, optimization tasks test_checkpoints.py test_data_sets.py \
    test_not_finite.py)

# on a Slurm of several nodes on this machine, where one can be started
test-cluster: $(READY)
	PYTHON=$(BIN)/python LIMIT_S=900 tests/cluster/run -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest tests --ignore tests/mpi --ignore tests/cluster \
	    --ignore tests/simulated_device -m slow || test $$? -eq 5
	$(BIN)/python -m pytest tests/simulated_device -m slow
	PYTHON=$(BIN)/python tests/cluster/run -m slow
	set -e; for ranks in 2 3 4 5 6 8; do \
	    $(RUN) 3000 -n $$ranks $(MPI_TESTS) -m slow tests/mpi || test $$? -eq 5; \
	done
	set -e; for ranks in 2 3; do \
	    $(RUN) 3000 -n $$ranks $(MPI_TESTS) -m "not slow" tests/mpi/comm \
	        tests/mpi/fuzz tests/mpi/pipeline tests/mpi/spatial tests/mpi/training; \
	done
	SPATIALDL_GRIDS=all $(RUN) 3000 -n 4 $(MPI_TESTS) -m "not slow" tests/mpi/spatial
	$(RUN) 3000 -n 4 $(MPI_TESTS) -m "not slow" $(ON_TWO)
	$(RUN) 3000 -n 1 $(MPI_TESTS) -m "not slow" tests/mpi/comm/test_handover.py tests/mpi/fuzz
	# more ranks than a grid has rows: stages of one rank beside stages of many; of one
	set -e; for ranks in 5 6 8; do \
	    $(RUN) 3000 -n $$ranks $(MPI_TESTS) -m "not slow" tests/mpi/pipeline/test_equal_numbers.py \
	        tests/mpi/comm/test_handover.py tests/mpi/fuzz; \
	done
	SIM_DELAY_US=20 $(ON_SIM)=nccl $(RUN) 3000 -n 4 $(MPI_TESTS) -m "not slow" \
	    tests/mpi/pipeline/test_equal_numbers.py
	# all layouts on the simulated accelerator, and all that surrounds their steps
	SIM_DELAY_US=20 $(ON_SIM)=nccl $(RUN) 1200 -n 3 $(MPI_TESTS) -m "not slow" \
	    tests/mpi/pipeline/test_equal_numbers.py
	set -e; for ranks in 2 3; do \
	    $(ON_SIM)=nccl $(RUN) 3000 -n $$ranks $(MPI_TESTS) -m "not slow" $(WHOLE_RUNS); \
	done
	SPATIALDL_DEVICES=1 $(ON_SIM)=host $(RUN) 3000 -n 4 $(MPI_TESTS) -m slow \
	    tests/mpi/pipeline/test_host_waits.py
	$(MAKE) test-gpu GPU=sim
	set -e; for path in host mpi; do \
	    $(ON_SIM)=$$path $(RUN) 3000 -n 4 $(MPI_TESTS) -m "not slow" \
	        tests/mpi/pipeline/test_equal_numbers.py; \
	done
	# the same equality over torch.distributed
	set -e; for ranks in 2 3 4; do \
	    SPATIALDL_TRANSPORT=torch $(RUN) 3000 -n $$ranks $(MPI_TESTS) -m "not slow" tests/mpi; \
	done

# lines of the package that tests run, in all processes; of make test, but for numbers of ranks other than 4
COUNTED := COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/.coverage
coverage: $(READY)
	$(BIN)/pip install --quiet "coverage>=7.10,<8"
	$(BIN)/coverage erase
	$(COUNTED) $(SERIAL) tests $(NOT_SERIAL) --deselect tests/slides/batch/test_batches.py::test_a_full_disk \
	    --deselect tests/slides/batch/test_batches.py::test_a_disk_too_full_for_reports  # for coverage, too
	$(COUNTED) $(RUN) 3600 -n 4 $(MPI_TESTS) -m "not slow" tests/mpi
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --sort cover --skip-covered

# faults planted all over the package, and bugs of the past, one at a time: which do the tests notice?
# Hours; it goes on where it was stopped, and its records lie in .faults/
mutants: $(READY)
	$(BIN)/python tools/faults/run.py reach
	$(BIN)/python tools/faults/run.py try
	$(BIN)/python tools/faults/run.py try --faults tools/faults/fixes.json --result .faults/fixes.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

typecheck: $(READY)
	$(BIN)/mypy

$(DOCS): $(READY)
	$(PIP) --editable ".[docs]"
	touch $(DOCS)

# the site, into site/; a link that leads nowhere, or a page that is not in the navigation, is an error
# (not with --quiet, which hides from --strict what it looks for)
.PHONY: docs
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html is the first page"

bench: $(READY)
	$(BIN)/python -m benchmarks.spatial
	$(BIN)/python -m benchmarks.communication --halo

# on the GPUs of this machine, each rank on its own where there are enough; one that fails is no end
SHARED = $(shell $(BIN)/python -c "import torch; print(-(-$(RANKS) // max(1, torch.accelerator.device_count())))")
bench-gpu: $(READY)
	-$(BIN)/python -m benchmarks.spatial --device auto --ranks $(RANKS) --threads $(RANKS) --batch $(RANKS) --ddp \
	    --model resnet50
	-$(BIN)/python -m benchmarks.memory --device auto --ranks 1 $(RANKS) --limit 8000
	-$(BIN)/python -m benchmarks.layouts device=auto model=resnet50 data.image_size=[1024,1024] data.batch_size=4 \
	    parallel=sp parallel.grid=[1,1],[$(RANKS),1] comm.ranks_per_device=$(SHARED)
	-$(BIN)/python -m benchmarks.layouts --set stages device=auto comm.ranks_per_device=$(SHARED)
	-$(BIN)/python -m benchmarks.communication --device auto --grid 1 $(RANKS)

clean:
	rm -rf .venv .venv-torch-* build *.egg-info outputs demo site
