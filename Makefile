# One virtual environment per constraints file; each command below does all of its own set-up.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
BIN = $(VENV)/bin
READY = $(VENV)/.ready
# Apart from the rest: where flash-linear-attention is installed, the stock models take it, and on a CPU they fail.
KERNELS = $(VENV)/kernels
# What depends on torch's release and on the device: meshes, kernels, and parity with the stock model.
SLICE = tests/distributed tests/ops tests/models/test_mtp.py tests/models/test_mtp_ranks.py \
	tests/models/test_taken_over_again.py tests/models/test_surface.py tests/models/test_parity.py \
	tests/models/test_parity_ranks.py tests/train/test_train_pipeline.py tests/train/test_train_mtp.py
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: setup test test-oldest test-slice lint demo bench screens models chaos soak matrix losses clean

setup: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[train,datasets,lora,trl,audio,video,demo,dev]'
	touch $@

$(KERNELS)/.ready: $(READY) constraints/kernels.txt
	$(BIN)/python -m pip install -q --no-deps --target $(KERNELS) --upgrade -r constraints/kernels.txt
	touch $@

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint pytest-only

test-oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints/oldest.txt pytest-only

# On another torch or on a machine with a GPU, with the packages that are there: make test-slice BIN=/path/to/its/bin
test-slice:
	$(BIN)/python -m pytest $(SLICE)

.PHONY: pytest-only
pytest-only: $(KERNELS)/.ready
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest tests/kernels

demo: $(READY)
	$(BIN)/seqbraid demo

bench: $(READY)
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/loss_memory.py --tokens 16384 --hidden 256
	$(BIN)/python benchmarks/memory_per_rank.py

# Pictures of what users see, into out/screens, to be looked at: terminals through tmux, pages through Chromium
# (apt-get install tmux chromium).
screens: $(READY)
	$(BIN)/python -m tests.screens

# What holds for every causal language model type of transformers, into docs/models.md; goes on where it was stopped.
models: $(READY)
	$(BIN)/python -W ignore -m tests.models.table --docs docs/models.md

# Kills ranks at random moments, twenty times of each kind, and disturbs runs in other ways, ten times of each: looks
# whether the resumed runs are bit for bit right.
chaos: $(READY)
	$(BIN)/python -m tests.train.chaos --trials 20
	$(BIN)/python -m tests.train.chaos --trials 10 --kinds int,hup,usr1,worker,shard,full,twins,host

# Two hundred short runs on 2 and 4 ranks, each of which must end with status 0.
soak: $(READY)
	$(BIN)/python -m tests.soak --runs 200

# 20 random tiny models of every family, 5 seeds each, against stock, with every defect planted on each; some on ranks.
# One line a case in out/matrix.jsonl: started again, it goes on behind the last one. Then tp, ep and pp beside the
# other axes, into docs/matrix.md. First the meshes and families that tests on ranks leave out.
matrix: $(READY)
	$(BIN)/python -m pytest tests/models/ranks_grid.py tests/distributed/shared_grid.py
	$(BIN)/python -m tests.verify.matrix --models 20 --seeds 5
	$(BIN)/python -m tests.verify.matrix --models 2 --seeds 1 --mesh ring=2 dp_shard=2
	$(BIN)/python -W ignore -m tests.verify.matrix --models 2 --seeds 1 --mesh shared stages --state out/meshes.jsonl --docs docs/matrix.md

# A loss of log-probabilities, entropies and sums over samples on all meshes and families that the tests leave out.
losses: $(READY)
	$(BIN)/python -m pytest tests/models/losses_grid.py

clean:
	rm -rf .venv .venv-oldest build *.egg-info
