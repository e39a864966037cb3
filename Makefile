# From a bare clone, `make serve` and `make test` each do everything: environment, model, run.
#
#   make serve [HOST=127.0.0.1] [PORT=8000] [ARGS="--model DIR ..."]
#   make test  [ARGS="tests/engine -k plan"]
#   make lint
#   make bench [ARGS=...]
#   make install [EXTRA=cpu|gpu] [PYTHON=python3]

PYTHON ?= python3
EXTRA ?= $(or $(shell cat .venv/extra 2>/dev/null),cpu)
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed-$(EXTRA)

.PHONY: install model serve test lint bench

install: $(INSTALLED)

$(INSTALLED): pyproject.toml .ci/install.sh
	@.ci/install.sh .venv $(EXTRA) $(PYTHON)
	@touch $@

model: install
	@$(BIN)/blendgate models prepare

serve: install
	$(BIN)/blendgate serve --host $(HOST) --port $(PORT) $(ARGS)

test: model
	$(BIN)/pytest -m "not gpu" $(ARGS)

lint: install
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: model
	$(BIN)/blendgate bench $(ARGS)
