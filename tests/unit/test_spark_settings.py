"""Any ``spark.*`` setting can be given, and wins over ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from avow.engines.spark import spark_settings
from avow.plan import load_checked

FILE = Path(__file__).parents[2] / "examples" / "payments.toml"
JARS = [Path("/a.jar"), Path("/b.jar")]


def settings(tmp_path: Path, spark: str = "", *, short: bool = False, archive: Path | None = None) -> dict[str, str]:
    path = tmp_path / "pipeline.toml"
    path.write_text(FILE.read_text() + f"\n[spark]\n{spark}\n")
    return spark_settings(
        load_checked(path, {"DATABASE_URL": "postgresql://me@h/d"}), JARS, short=short, archive=archive
    )


def test_what_is_given_reaches_spark_and_wins(tmp_path: Path) -> None:
    found = settings(tmp_path, 'master = "spark://host:7077"\nexecutor.memory = "3g"\nsql.session.timeZone = "CET"')
    assert found["spark.master"] == "spark://host:7077"
    assert found["spark.executor.memory"] == "3g"
    assert found["spark.sql.session.timeZone"] == "CET"
    assert not [key for key in found if key.startswith("spark.spark.")]


def test_only_a_local_master_gets_local_settings(tmp_path: Path) -> None:
    local, cluster = settings(tmp_path), settings(tmp_path, 'master = "yarn"')
    assert local["spark.master"].startswith("local[")
    assert local["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in cluster
    assert "spark.driver.extraJavaOptions" not in cluster


def test_a_short_run_starts_with_the_first_compiler_only(tmp_path: Path) -> None:
    assert "TieredStopAtLevel=1" in settings(tmp_path, short=True)["spark.driver.extraJavaOptions"]
    assert "TieredStopAtLevel" not in settings(tmp_path)["spark.driver.extraJavaOptions"]


def test_an_archive_is_used_where_the_driver_is_local(tmp_path: Path) -> None:
    kept = Path("/cache/spark.jsa")
    assert f"-XX:SharedArchiveFile={kept}" in settings(tmp_path, archive=kept)["spark.driver.extraJavaOptions"]
    assert "SharedArchiveFile" not in str(settings(tmp_path, 'master = "yarn"', archive=kept))


def test_jars_of_the_users_own_come_beside_ours(tmp_path: Path) -> None:
    local = settings(tmp_path, 'jars = "/mine.jar"')
    assert local["spark.jars"] == "/mine.jar"
    assert local["spark.driver.extraClassPath"] == "/a.jar:/b.jar"
    assert settings(tmp_path, 'driver.extraClassPath = "/mine"')["spark.driver.extraClassPath"] == "/a.jar:/b.jar:/mine"
    assert settings(tmp_path, 'master = "yarn"\njars = "/mine.jar"')["spark.jars"] == "/a.jar,/b.jar,/mine.jar"


WITHOUT_PANDAS = """
import struct, sys
import pyarrow as pa
from avow.engines import daemon
from avow.engines.task import check_batch, last_fingerprint
from avow.ledger import OffsetRange

def column(type_, form, *values):
    packed = struct.pack(f"<{len(values)}{form}", *values)
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(packed)])

def texts(type_, *values):
    return pa.concat_arrays([pa.nulls(0, type_), *(pa.Array.from_buffers(
        type_, 1, [None, pa.py_buffer(struct.pack("<ii", 0, len(v))), pa.py_buffer(v)]) for v in values)])

batch = pa.RecordBatch.from_arrays(
    [texts(pa.string(), b"t", b"t"), column(pa.int32(), "i", 3, 3), column(pa.int64(), "q", 7, 9),
     column(pa.timestamp("us", "UTC"), "q", 5_000, -1_000), texts(pa.binary(), b"k", b"k"),
     texts(pa.binary(), b"v", b"w"), pa.nulls(2, pa.string())],
    ["topic", "partition", "offset", "timestamp", "key", "value", "headers"],
)
check_batch(batch, OffsetRange("t", 3, 7, 10), 7)
assert last_fingerprint(batch).timestamp_ms == -1, last_fingerprint(batch)
assert last_fingerprint(batch.slice(0, 1)).timestamp_ms == 5
print("pandas" in sys.modules)
"""


def test_a_worker_does_not_wait_for_pandas() -> None:
    told = subprocess.run([sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout.strip()) == (0, "False"), told.stderr
