# The ways to build, run and test taskd. `make help` lists them.
# Set CARGO_TARGET_DIR to build elsewhere than in target/, for example to share what is compiled between checkouts.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TARGET := $(or $(CARGO_TARGET_DIR),target)
# rustup puts ~/.cargo/bin on the path, and it needs no root.
BIN := $(if $(PREFIX),$(PREFIX)/bin,$(or $(CARGO_HOME),$(HOME)/.cargo)/bin)
# rustup tells new shells where cargo is; this one may be older.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  %-11s %s\n' "$$name" "$$text"; done

.PHONY: run
run: ## Build taskd and run all pipelines, with nothing to configure (ARGS="--http-listen …" adds arguments)
	@scripts/install-deps run
	cargo build --release --locked
	@scripts/split-debug "$(TARGET)/release/taskd"
	@exec "$(TARGET)/release/taskd" --pipelines all $(ARGS)

.PHONY: install
install: ## Put taskd on the path: in ~/.cargo/bin, or in PREFIX/bin (PREFIX=/usr/local; DESTDIR for packages)
	@scripts/install-deps run
	cargo build --release --locked
	@scripts/split-debug "$(TARGET)/release/taskd"
	install -D -m 755 "$(TARGET)/release/taskd" "$(DESTDIR)$(BIN)/taskd"

.PHONY: dist
dist: ## Make the archives of a release in target/archives: taskd, its symbols, licences, manual pages, completions, checksums
	@scripts/install-deps run
	@scripts/dist $(ARGS)

.PHONY: test
test: ## Everything that CI checks: format, lints, all tests against real servers
	@scripts/install-deps test
	@scripts/test

# Most tests wait more than they compute: more of them at once than there are cores.
.PHONY: quick
quick: ## Format, lints and the tests that need no more than redis-server and curl: a minute after a change of one file
	@scripts/install-deps quick
	@scripts/check-style
	@scripts/check-commits
	@scripts/check-dependencies
	cargo fmt --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo test --locked --lib --test it --test session --test worker -- --test-threads $(or $(RUST_TEST_THREADS),8)

.PHONY: proto
proto: ## Generate the Rust, Python and Go code of proto/ after a change there
	@scripts/proto
	@scripts/check-python --proto
	@scripts/check-go --proto

.PHONY: soak
soak: ## All faults in random order while the work goes on (ARGS="--minutes 10 --seed 42")
	@scripts/install-deps soak
	@scripts/soak $(ARGS)

.PHONY: model
model: ## Check the rules of the queue, the flow, trees and joins exhaustively on small cases: docs/model
	python3 docs/model/queue_model.py $(ARGS)
	python3 docs/model/tree_model.py $(ARGS)
	python3 docs/model/join_model.py $(ARGS)

.PHONY: demo
demo: ## Crawl the Python documentation on this machine with four workers
	@scripts/install-deps demo
	@scripts/demo

.PHONY: bench
bench: ## Measure throughput and latency beside the machine's own limits: docs/benchmarks.md (ARGS="--quick flow")
	@scripts/install-deps bench
	@scripts/bench $(ARGS)

.PHONY: bench-peers
bench-peers: ## Measure other queues and taskd on the same work, with the harness in PEERS_BENCH (ARGS="1": one round)
	@scripts/bench-peers $(ARGS)

.PHONY: services
services: ## Start the servers of the tests and print how `cargo test` finds them: eval "$(make -s services)"
	@scripts/install-deps test >&2
	@scripts/services start

.PHONY: clean
clean: ## Stop the servers of the tests, and remove what was built
	@scripts/services stop
	cargo clean
