"""Any ``spark.*`` setting can be given, and wins over ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from avow.engines.session import JAVA, JAVA_SHORT, spark_settings
from avow.local import java
from avow.local.class_archive import ClassArchive
from avow.plan import load_checked

FILE = Path(__file__).parents[2] / "examples" / "payments.toml"
SPARKS_ZIP = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
SPARKS_JAR = Path(pyspark.__file__).parent / "jars" / "spark-core_2.13-4.1.3.jar"


def settings(tmp_path: Path, spark: str = "", *, short: bool = False, archive: Path | None = None) -> dict[str, str]:
    path = tmp_path / "pipeline.toml"
    path.write_text(FILE.read_text() + f"\n[spark]\n{spark}\n")
    return spark_settings(load_checked(path, {"DATABASE_URL": "postgresql://me@h/d"}), short=short, archive=archive)


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


def test_a_short_run_starts_with_the_first_compiler_only(tmp_path: Path) -> None:
    assert "TieredStopAtLevel=1" in settings(tmp_path, short=True)["spark.driver.extraJavaOptions"]
    assert "TieredStopAtLevel" not in settings(tmp_path)["spark.driver.extraJavaOptions"]


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077"])
def test_the_driver_is_quiet_and_quick_whatever_the_master(tmp_path: Path, master: str) -> None:
    kept = Path("/cache/spark.jsa")
    found = settings(tmp_path, f'master = "{master}"', archive=kept)
    assert f"-XX:SharedArchiveFile={kept}" in found["spark.driver.extraJavaOptions"]
    assert "log4j2.configurationFile" in found["spark.driver.extraJavaOptions"]


@pytest.mark.parametrize("options", [JAVA, JAVA_SHORT])
def test_what_the_drivers_jvm_warns_of_is_not_on_our_standard_output(options: str) -> None:
    """Of an archive that does not fit, say, in the middle of an answer in JSON. Here: of a log that does not exist."""
    command = [str(java.find().path), *options.split(), "-Xlog:gc+cds+age=info", "-version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning" in told.stderr
    assert told.stdout == ""


def test_an_archive_of_other_jars_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that was made again, at the same place and of the same versions, has jars with other times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"a jar")
    archive = ClassArchive("Spark", "", tmp_path, [jar])
    made = archive.path
    made.parent.mkdir()
    made.touch()
    assert archive.made() == made
    os.utime(jar, (1, 1))
    assert archive.made() is None


def test_a_worker_keeps_the_zips_of_the_users_own(tmp_path: Path) -> None:
    """Only Spark's own zips give way to the installed pyspark; a short path is not stumbled over."""
    mine = tmp_path / "python" / "lib" / "mine.zip"
    told = subprocess.run(
        [sys.executable, "-c", "import sys; from avow.engines import daemon; print(*sys.path, sep='\\n')"],
        env=os.environ | {"PYTHONPATH": f"{SPARKS_ZIP}:{SPARKS_JAR}:{mine}:{tmp_path}:/mine.zip"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    path = told.stdout.splitlines()
    assert not {str(SPARKS_ZIP), str(SPARKS_JAR)} & set(path)
    assert {str(mine), "/mine.zip"} <= set(path)


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
check_batch(batch.slice(1), OffsetRange("t", 3, 8, 10), 8)
assert last_fingerprint(batch).timestamp_ms == -1, last_fingerprint(batch)
assert last_fingerprint(batch.slice(0, 1)).timestamp_ms == 5
print("pandas" in sys.modules)
"""


def test_a_worker_does_not_wait_for_pandas() -> None:
    told = subprocess.run([sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout.strip()) == (0, "False"), told.stderr


SECRET = r"p@ss = w\ord: #1!é"
STARTED = """
import json, os, stat, sys
from pathlib import Path
import psutil
from avow.engines import session
from avow.plan import load_checked

pipeline = load_checked(Path(sys.argv[1]), {"DATABASE_URL": "postgresql://me@h/d", "SECRET": sys.argv[2]})
spark = session.spark_session(pipeline, short=True)
(jvm,) = (one for one in psutil.Process().children(recursive=True) if one.name() == "java")
log = session._started.log
jvm_conf = spark.sparkContext._jsc.sc().conf()
print(json.dumps({
    "set": [spark.sparkContext.getConf().get("spark.hadoop.my.password"), jvm_conf.get("spark.hadoop.my.password")],
    "memory": jvm_conf.get("spark.driver.memory"),
    "command": " ".join(jvm.cmdline()),
    "log": [str(log), stat.S_IMODE(log.stat().st_mode)],
    "arguments": os.environ.get("PYSPARK_SUBMIT_ARGS"),
}))
spark.stop()
"""


def test_settings_are_not_in_the_command_line_and_the_log_is_private(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.toml"
    settings = 'master = "local[1]"\ndriver.memory = "600m"\nhadoop.my.password = "${env:SECRET}"'
    path.write_text(FILE.read_text() + f"\n[spark]\n{settings}\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-c", STARTED, str(path), SECRET]
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["set"] == [SECRET, SECRET]
    assert told["memory"] == "600m"
    assert "-Xmx600m" in told["command"], "what the JVM has to start with"
    assert "p@ss" not in told["command"]
    log, mode = told["log"]
    assert mode == 0o600
    assert Path(log).name != f"avow-spark-{os.getpid()}.log"
    assert told["arguments"] is None
    left = [one.name for one in temporary.iterdir() if not one.name.endswith(".log")]
    assert left == [], "no file with secrets"


CLIENT_ALONE = """
import sys
for name in ("py4j", "pyspark.core", "pyspark.java_gateway"):  # as pyspark-client is installed
    sys.modules[name] = None
import avow.audit.spark, avow.engines.redrive, avow.engines.spark, avow.local.spark, avow.pipeline
from pyspark.util import is_remote_only
assert is_remote_only()
"""


def test_nothing_that_a_run_imports_needs_more_than_the_client_of_spark_connect() -> None:
    done = subprocess.run([sys.executable, "-c", CLIENT_ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
