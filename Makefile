# make demo | make test | make test-slow | make lint | make bench
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready

# one thread per rank, and ranks that wait give up their core
export OMP_NUM_THREADS ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe

.PHONY: demo test test-serial test-mpi test-slow lint typecheck bench clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[mpi,dev,proof]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py $(if $(SLIDES),--slides "$(SLIDES)")

test: test-serial test-mpi

test-serial: $(READY)
	$(BIN)/python -m pytest tests --ignore tests/mpi -m "not slow"

test-mpi: $(READY)
	set -e; for ranks in 3 4; do \
	    $(BIN)/mpiexec --oversubscribe --timeout 2400 -n $$ranks \
	        $(BIN)/python -m pytest tests/mpi -m "not slow" -p no:cacheprovider; \
	done

	# operators on a grid of one row
	$(BIN)/mpiexec --oversubscribe --timeout 1200 -n 2 \
	    $(BIN)/python -m pytest tests/mpi/test_op_db.py tests/mpi/test_attention.py \
	        -m "not slow" -p no:cacheprovider

	# other numbers of ranks: one, and stages of 4 beside stages of 1 and 2
	set -e; for ranks in 1 2 5 6; do \
	    $(BIN)/mpiexec --oversubscribe --timeout 1200 -n $$ranks \
	        $(BIN)/python -m pytest tests/mpi/test_equal_numbers.py tests/mpi/test_handover.py \
	            -m "not slow" -p no:cacheprovider; \
	done

test-slow: $(READY)
	$(BIN)/python -m pytest tests --ignore tests/mpi -m slow || test $$? -eq 5
	set -e; for ranks in 2 3 4; do \
	    $(BIN)/mpiexec --oversubscribe --timeout 3000 -n $$ranks \
	        $(BIN)/python -m pytest tests/mpi -m slow -p no:cacheprovider || test $$? -eq 5; \
	done
	# the same equality over torch.distributed
	set -e; for ranks in 2 3 4; do \
	    SPATIALDL_TRANSPORT=torch $(BIN)/mpiexec --oversubscribe --timeout 3000 -n $$ranks \
	        $(BIN)/python -m pytest tests/mpi -m "not slow" -p no:cacheprovider; \
	done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m spatialdl.bench spatial
	$(BIN)/python -m spatialdl.bench halo

clean:
	rm -rf .venv build *.egg-info outputs demo
