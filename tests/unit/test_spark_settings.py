"""Any ``spark.*`` setting can be given, and wins over ours."""

from __future__ import annotations

from pathlib import Path

from avow.engines.spark import spark_settings
from avow.plan import load_checked

FILE = Path(__file__).parents[2] / "examples" / "payments.toml"
JARS = [Path("/a.jar"), Path("/b.jar")]


def settings(tmp_path: Path, spark: str = "", *, short: bool = False) -> dict[str, str]:
    path = tmp_path / "pipeline.toml"
    path.write_text(FILE.read_text() + f"\n[spark]\n{spark}\n")
    return spark_settings(load_checked(path, {"DATABASE_URL": "postgresql://me@h/d"}), JARS, short=short)


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
