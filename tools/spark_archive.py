"""Makes `.venv/spark.jsa`, from which the JVMs of tests map Spark's classes instead of loading and checking each.

A JVM that has it starts in half the time, and with a quarter of the processor time. `tests/conftest.py` says which
options use it; a JVM that finds it made for other jars or another Java starts without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(sys.prefix, "spark.jsa")
WAIT_S: Final = 120.0


def main() -> int:
    import pyspark

    jars = Path(pyspark.__file__).with_name("jars")
    if ARCHIVE.exists() and ARCHIVE.stat().st_mtime > jars.stat().st_mtime:
        return 0
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    new = ARCHIVE.with_suffix(f".{os.getpid()}")
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit={new}"
    )
    from midstream.spark.session import get_session

    print("making an archive of Spark's classes for tests (half a minute, once)", flush=True)
    session = get_session("local[2]", "classes")
    with tempfile.TemporaryDirectory() as directory:
        session.range(1000, numPartitions=2).selectExpr("id", "id % 7 AS k").write.parquet(f"{directory}/rows")
        assert len(session.read.parquet(f"{directory}/rows").groupBy("k").count().collect()) == 7
    assert session.sparkContext.parallelize(range(10), 2).map(lambda n: n + 1).sum() == 55
    session.stop()
    gateway = session.sparkContext._gateway
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()  # the JVM ends, and writes the archive
    process.wait(WAIT_S)
    if not new.exists():
        print("this Java makes no archive of classes: tests start Spark without one")
        return 0
    new.rename(ARCHIVE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
