# Every target sets up what it needs first: .venv from nothing but a system Python.
.DEFAULT_GOAL := help
BIN := .venv/bin
# Spark on one machine: executors that bind an outside address may not be reachable, or too reachable.
export SPARK_LOCAL_IP ?= 127.0.0.1
export PYTHON
# Modules are compiled once, not in each of the hundreds of processes that tests start, whatever the environment has.
export PYTHONDONTWRITEBYTECODE :=
REPEAT ?= 20
RECOVERY_REPEAT ?= 100
RECOVERY_SEEDS ?= 100000
SIMULATED_SEEDS ?= 200
SIM_SECONDS ?= 120
BENCHES ?= window udf strings sliding exchange latency checkpoint recovery nexmark simulate
PROCESSES ?= 3
PROTOCOL_ROOMS := core state operators graph protocol checkpoint exchange worker coordinator

.PHONY: help setup lock setup-python demo kafka-demo lakehouse-demo test test-systems release coverage docs simulate check format bench peers minimums nightly clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

setup:  ## .venv with everything installed; says what else is missing
	@tools/setup.sh

lock:  ## tools/locked.txt anew: the versions that make setup installs, as pip finds them today
	@tools/lock.sh

setup-python:
	@tools/setup.sh --without-java

demo: setup  ## 336,776 real flights through a stateful job on embedded Spark, exactly once
	@rm -rf out/demo
	$(BIN)/midstream run examples/flights.py
	@$(BIN)/python tools/show_demo.py

kafka-demo: setup  ## the same flights from Kafka to Kafka, with a broker of its own and a slot that is killed; needs mvn
	@$(BIN)/python tools/kafka_server.py $(BIN)/python examples/kafka.py

lakehouse-demo: setup  ## changes of a PostgreSQL table into an Iceberg table, with a slot that is killed; needs PostgreSQL
	@$(BIN)/python tests/postgres_server.py $(BIN)/python examples/lakehouse.py

.venv/spark.jsa: tools/spark_archive.py | setup
	@$(BIN)/python tools/spark_archive.py

test: setup .venv/spark.jsa  ## tests of everything that needs no server, and two on embedded Spark, in PROCESSES=3 processes
	$(BIN)/pytest -q -n $(PROCESSES) --dist worksteal -m "not systems or smoke"

test-systems: setup .venv/spark.jsa  ## tests with Spark, Kafka, PostgreSQL, an object store, a browser and networks of their own
	$(BIN)/pytest -q -n $(PROCESSES) --dist loadfile -m "systems and not smoke"

release: setup-python  ## sdist and wheel in dist, checked as users install them (RELEASE=--tag: HEAD must have the version's tag)
	@PYTHON=$(BIN)/python tools/release.sh $(RELEASE)

coverage: setup-python  ## which lines and branches of the protocol rooms the tests of these rooms alone reach
	$(BIN)/coverage run -m pytest -q -m "not spark" tests/engine
	@for room in $(PROTOCOL_ROOMS); do \
		printf '%-12s %3s %%\n' $$room $$($(BIN)/coverage report --include="src/midstream/engine/$$room/*" --format=total); \
	done

docs: setup-python  ## the documentation as a site, with a reference of the API, in out/docs
	$(BIN)/sphinx-build -q -W -c docs/site -b html . out/docs
	@echo out/docs/docs/site/index.html

simulate: setup-python  ## fresh seeds in the simulator for SIM_SECONDS=120; the commit decides which (SIM_BASE=N: others)
	@base=$${SIM_BASE:-$$(printf '%d' "0x$$(git rev-parse --short=7 HEAD 2>/dev/null || date +%y%m%d)")}; \
	echo "seed base $$base"; \
	$(BIN)/python -m midstream_lab simulate --seeds $$base:$$((base + 1000000)) --seconds $(SIM_SECONDS)

check: setup-python  ## lint, formatting, types: strict in src, nearly so in tests
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check --no-cache
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

format: setup-python  ## let ruff put the code in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup  ## the benchmarks of benchmarks/README.md (BENCHES="window latency" picks some)
	@for name in $(BENCHES); do $(BIN)/python -m midstream_lab bench $$name || exit; done

peers: setup  ## Flink, PyFlink, Bytewax and Spark's Kafka connector in .peers/, for python benchmarks/compare.py; needs a JDK 17 and 2 GB of disk
	@tools/peers_flink.sh
	@tools/peers_spark.sh
	@tools/peers_python.sh
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'

minimums: setup  ## tests with the oldest dependencies that pyproject.toml allows, in .minimums (PYTHON=python3.11: with that one)
	@tools/test_minimums.sh

nightly: export NIGHTLY = 1
nightly: check test test-systems release minimums  ## also an hour of fresh seeds, known bugs looked for in random ones, recovery at length, correct jobs over many seeds, half an hour of mutated checkpoints, Kafka to Kafka with everything killed, a standalone cluster in which something fails sixty times, random programs on processes and on Spark that are killed, frozen and rescaled, jobs on YARN whose drivers and executors are killed, and the tests on real Spark slots, REPEAT=20 times in a row
	@$(MAKE) simulate SIM_SECONDS=3600
	@$(BIN)/python -m midstream_lab mutations
	@$(BIN)/python -m midstream_lab simulate --topology keyed_broadcast --parallelism 7 --rescale-to 2 --seeds 0:$(RECOVERY_SEEDS)
	@RECOVERY_REPEAT=$(RECOVERY_REPEAT) $(BIN)/pytest -q tests/spark/test_keyed_broadcast.py
	@SIMULATED_SEEDS=$(SIMULATED_SEEDS) $(BIN)/pytest -q tests/testing/test_simulated_correct_jobs.py
	@SOAK_FAULTS=60 $(BIN)/pytest -q -s tests/spark/test_soak.py
	@MUTANT_SECONDS=1800 $(BIN)/pytest -q tests/engine/checkpoint/test_mutated_checkpoints.py
	@CHAOS_SECONDS=3600 $(BIN)/pytest -q -s tests/runtime/test_chaos.py
	@KAFKA_RUNS=$(REPEAT) KAFKA_RECORDS=500000 $(BIN)/pytest -q -s tests/connectors/test_kafka_acceptance.py
	@KAFKA_KILLS=9 $(BIN)/pytest -q -s tests/connectors/test_kafka_failover.py
	@for i in $$(seq $(REPEAT)); do echo "real Spark slots, run $$i of $(REPEAT)"; $(BIN)/pytest -q -m spark || exit; done

clean:  ## what builds and runs leave behind; .venv stays
	rm -rf out state dist build spark-warehouse .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src lab tests examples -name __pycache__ -prune -exec rm -rf {} +
