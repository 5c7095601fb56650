"""A Spark standalone cluster on this machine: one master and its workers, from pyspark's own jars, each a part by pid.

It shows what a local master cannot: executors in JVMs of their own, which a fault can end while the driver lives on.
A worker stands for a machine. Loopback only, and no passwords: for trying and testing.

Owns: how master and workers are started, and when they are ready. Must not know: pipelines. A run is sent there by
``[spark] master = "spark://..."``, as to any other cluster.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil
import pyspark

from avow.errors import LocalError
from avow.local import java
from avow.local.cluster import PortPicker
from avow.local.part import ClusterPart
from avow.retry import poll_until

READY_TIMEOUT_S = 60
SPARK_HOME = Path(pyspark.__file__).parent
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

# The master is on this machine, whatever proxy the environment names for others.
_open = build_opener(ProxyHandler({})).open


class _Daemon(ClusterPart):
    """A JVM of Spark's own that runs executors or gives them out."""

    main: str

    def __init__(self, name: str, folder: Path, port: int, page_port: int) -> None:
        super().__init__(name, folder, port)
        self.page = f"http://127.0.0.1:{page_port}"
        self._page_port = page_port

    def environment(self) -> dict[str, str]:
        # What Spark's own start scripts set: a worker needs it to start executors, which bind to the same address.
        return {"SPARK_HOME": str(SPARK_HOME), "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_IP": "127.0.0.1"}

    def command(self) -> list[str | Path]:
        # Small, and quick to start rather than quick for long: these two hardly work.
        options = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={self.folder / 'tmp'}")
        listen = ("--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self._page_port))
        jvm = (*options, *self.java_options(), "-cp", str(SPARK_HOME / "jars" / "*"), self.main)
        return [java.find().path, *jvm, *listen, *self.arguments()]

    def java_options(self) -> list[str]:
        return []

    def arguments(self) -> list[str | Path]:
        return []

    def prepare(self) -> None:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)


class Master(_Daemon):
    """Killed and started again, it finds in its folder who its workers and applications were."""

    main = "org.apache.spark.deploy.master.Master"

    def java_options(self) -> list[str]:
        settings = {
            "deploy.recoveryMode": "FILESYSTEM",
            "deploy.recoveryDirectory": self.folder / "recovery",
            "master.rest.enabled": "false",  # a second door, on a port of its own choice
        }
        return [f"-Dspark.{name}={value}" for name, value in settings.items()]

    @property
    def url(self) -> str:
        return f"spark://{self.address}"

    def registered(self) -> set[int]:
        """The ports of the workers that it counts as alive; none if it does not answer."""
        try:
            with _open(f"{self.page}/json/", timeout=2) as answer:
                state: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return set()
        return {worker["port"] for worker in state["workers"] if worker["state"] == "ALIVE"}


class Worker(_Daemon):
    """It starts executors as children of its own. Killed, it takes them with it: they notice, and end."""

    main = "org.apache.spark.deploy.worker.Worker"

    def __init__(
        self, name: str, folder: Path, port: int, page_port: int, *, master: str, cores: int, memory: str
    ) -> None:
        super().__init__(name, folder, port, page_port)
        self._master = master
        self._cores = cores
        self._memory = memory

    def arguments(self) -> list[str | Path]:
        limits = ("--cores", str(self._cores), "--memory", self._memory)
        return [*limits, "--work-dir", self.folder / "work", self._master]

    def executors(self) -> list[psutil.Process]:
        """The JVMs that run tasks now, of any application."""
        executors = []
        process = self.process()
        with suppress(psutil.NoSuchProcess):
            for child in process.children() if process else []:
                with suppress(psutil.NoSuchProcess):
                    if EXECUTOR in child.cmdline():
                        executors.append(child)
        return executors


class Standalone:
    """A master and its workers in ``folder``. Making one starts nothing; ``with`` brings it up, and stops it after."""

    def __init__(self, folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "1g") -> None:
        folder = folder.absolute()
        pick = PortPicker()
        self.master = Master("master", folder / "master", pick.free(), pick.free())
        limits: dict[str, Any] = {"master": self.master.url, "cores": cores, "memory": memory}
        names = [f"worker-{number}" for number in range(1, workers + 1)]
        self.workers = [Worker(name, folder / name, pick.free(), pick.free(), **limits) for name in names]

    @property
    def url(self) -> str:
        """What ``[spark] master`` takes."""
        return self.master.url

    @property
    def parts(self) -> list[Master | Worker]:
        return [self.master, *self.workers]

    def up(self) -> None:
        """Start what is not running, and wait until the master counts every worker."""
        for part in self.parts:
            part.prepare()
            part.start()

        def missing() -> list[Worker]:
            for part in self.parts:
                part.check_running()
            return [worker for worker in self.workers if worker.port not in self.master.registered()]

        if not poll_until(lambda: not missing(), READY_TIMEOUT_S):
            late = (missing() or self.workers)[0]
            raise LocalError(
                f"{late.name} has not joined {self.url} after {READY_TIMEOUT_S} s",
                advice=f"See the logs {late.log} and {self.master.log}",
            )

    def down(self) -> None:
        """Stop every part that runs. Workers first: they then end their executors themselves."""
        for part in reversed(self.parts):
            part.ask_to_stop()
        for part in reversed(self.parts):
            part.stop()

    def __enter__(self) -> Standalone:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
