"""The local cluster as a whole: up, down, status, and its parts by name for faults.

Everything is in one folder (``.avow`` by default): ``cluster.json`` says what it is made of, each part has a
folder with its data, its log and its pid. The folder is the only state: any process can inspect, repair or stop it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from confluent_kafka import Consumer, KafkaException, Producer

from avow.errors import LocalError, SourceError
from avow.kafka import metadata
from avow.local import jars, java
from avow.local.broker import Broker, Doors, kafka_uuid
from avow.local.part import ClusterPart, PartState
from avow.local.postgres import Postgres, programs
from avow.local.registry import Registry, program
from avow.retry import poll_until

READY_TIMEOUT_S = 90
# Below the range from which the kernel takes ports for outgoing connections: a client that keeps trying to
# reach a dead broker on a port of that range can end up connected to itself, and then holds the port.
PORTS = range(20000, 32000)

Progress = Callable[[str, str], None]  # (part, what it does)


@dataclass(frozen=True, slots=True)
class Layout:
    """What ``cluster.json`` holds: what the cluster is made of, and where it listens."""

    cluster_id: str
    kafka_version: str
    broker_ports: tuple[int, ...]
    controller_ports: tuple[int, ...]
    postgres_port: int | None  # None: no PostgreSQL
    registry_port: int | None = None  # None: no schema registry
    doors: tuple[Doors, ...] = ()  # one per broker where proxies stand in front; ours to keep, not to choose

    @classmethod
    def read(cls, path: Path) -> Layout:
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            raw |= {name: tuple(raw[name]) for name in ("broker_ports", "controller_ports")}
            raw["doors"] = tuple(Doors(**door) for door in raw.get("doors", ()))
            return cls(**raw)
        except (ValueError, KeyError, TypeError) as error:
            advice = "`avow up --fresh` starts an empty cluster."
            raise LocalError(f"{path} cannot be read: {error}", advice=advice) from error

    def write(self, path: Path) -> None:
        making = path.with_suffix(".new")
        making.write_text(json.dumps(asdict(self), indent=2) + "\n")
        making.replace(path)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What ``up`` was asked for; None where nothing was said."""

    brokers: int | None
    postgres: bool | None
    registry: bool | None
    kafka_port: int | None
    postgres_port: int | None
    registry_port: int | None
    doors: tuple[Doors, ...]


@dataclass(frozen=True, slots=True)
class PartStatus:
    name: str
    state: PartState
    address: str
    pid: int | None
    version: str
    disk_bytes: int
    log: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    folder: str
    bootstrap: str
    postgres_url: str | None
    registry_url: str | None
    parts: tuple[PartStatus, ...]
    controller: int | None
    partitions: tuple[metadata.Partition, ...]
    problem: str  # why Kafka's own view is missing; empty if it is there

    @property
    def all_up(self) -> bool:
        return not self.problem and all(part.state is PartState.UP for part in self.parts)


class Cluster:
    """A handle on the cluster in ``folder``. Making one touches nothing."""

    def __init__(self, folder: Path = Path(".avow")) -> None:
        self.folder = folder.absolute()
        self._file = self.folder / "cluster.json"

    @property
    def exists(self) -> bool:
        return self._file.exists()

    @property
    def layout(self) -> Layout:
        if not self.exists:
            raise LocalError(f"no local cluster in {self.folder}", advice="`avow up` starts one.")
        return Layout.read(self._file)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.layout.broker_ports)

    @property
    def postgres_url(self) -> str | None:
        postgres = self.postgres()
        return postgres.url if postgres else None

    @property
    def registry_url(self) -> str | None:
        registry = self.registry()
        return registry.url if registry else None

    def parts(self) -> list[ClusterPart]:
        return [*self.brokers(), *filter(None, (self.postgres(), self.registry()))]

    def part(self, name: str) -> ClusterPart:
        """One part by name, for its handles: kill, pause, resume, stop, start."""
        for part in self.parts():
            if part.name == name:
                return part
        raise LocalError(f"the cluster has no part named {name}; its parts: {', '.join(p.name for p in self.parts())}")

    def brokers(self) -> list[Broker]:
        layout = self.layout
        voters = dict(enumerate(layout.controller_ports, 1))
        doors = layout.doors or (None,) * len(layout.broker_ports)
        return [
            Broker(number, self.folder / f"broker-{number}", port, voters, door)
            for number, (port, door) in enumerate(zip(layout.broker_ports, doors, strict=True), 1)
        ]

    def postgres(self) -> Postgres | None:
        port = self.layout.postgres_port
        return Postgres(self.folder / "postgres", port) if port else None

    def registry(self) -> Registry | None:
        port = self.layout.registry_port
        return Registry(self.folder / "registry", port) if port else None

    def up(
        self,
        *,
        brokers: int | None = None,
        postgres: bool | None = None,
        registry: bool | None = None,
        kafka_port: int | None = None,
        postgres_port: int | None = None,
        registry_port: int | None = None,
        fresh: bool = False,
        doors: tuple[Doors, ...] = (),
        progress: Progress = lambda _part, _text: None,
    ) -> None:
        """Start what is not running and wait until all of it is ready. Starts everything the first time.

        ``doors`` is for a new cluster, one per broker: listeners with a proxy in front, which must be there already.
        """
        with self._locked(make=True):
            if fresh and self.exists:
                self._stop_all(progress)
                self._erase()
            progress("jars", f"{len(jars.classpath('kafka'))} verified, Java {java.find().version}")
            wanted = _Wanted(brokers, postgres, registry, kafka_port, postgres_port, registry_port, doors)
            self._write_layout(wanted, progress)
            with ThreadPoolExecutor(2) as beside:
                others = [beside.submit(start, progress) for start in (self._start_postgres, self._start_registry)]
                self._start_brokers(progress)
                for other in others:
                    other.result()

    def down(self, progress: Progress = lambda _part, _text: None) -> None:
        """Stop every part that runs. The data stays."""
        with self._locked():
            self._stop_all(progress)

    def start(self, name: str) -> None:
        """Start one part and wait until it is ready."""
        part = self.part(name)
        part.start()
        if isinstance(part, Postgres):
            self._await_postgres(part)
        elif isinstance(part, Registry):
            part.await_ready()
        else:
            self._await_brokers({part.name})

    def restart(self, name: str) -> None:
        self.part(name).stop()
        self.start(name)

    def status(self) -> ClusterStatus:
        postgres, registry = self.postgres(), self.registry()
        controller, partitions, problem = None, tuple[metadata.Partition, ...](), ""
        try:
            view = metadata.view(metadata.admin(self.bootstrap), timeout_s=3)
            controller, partitions = view.controller, view.partitions
        except SourceError as error:
            problem = str(error)
        versions = {part.name: part.version() for part in (postgres, registry) if part and part.state is PartState.UP}
        return ClusterStatus(
            folder=str(self.folder),
            bootstrap=self.bootstrap,
            postgres_url=postgres.url if postgres else None,
            registry_url=registry.url if registry else None,
            parts=tuple(
                PartStatus(
                    name=part.name,
                    state=part.state,
                    address=part.address,
                    pid=part.pid,
                    version=self.layout.kafka_version if isinstance(part, Broker) else versions.get(part.name) or "",
                    disk_bytes=disk_use(part.folder),
                    log=str(part.log),
                )
                for part in self.parts()
            ),
            controller=controller,
            partitions=partitions,
            problem=problem,
        )

    # How it is done.

    @contextmanager
    def _locked(self, *, make: bool = False) -> Iterator[None]:
        """Only one process at a time changes a cluster. The folder itself is the lock: nothing is left behind."""
        if make:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not self.exists:
            raise LocalError(f"no local cluster in {self.folder}", advice="`avow up` starts one.")
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise LocalError(
                f"another avow is starting or stopping the cluster in {self.folder}",
                advice="Wait until it has finished, then try again.",
            ) from None
        finally:
            os.close(handle)

    def _erase(self) -> None:
        """Remove what we made, and nothing else that may be in the folder."""
        for part in self.parts():
            shutil.rmtree(part.folder, ignore_errors=True)
        self._file.unlink()

    def _write_layout(self, wanted: _Wanted, progress: Progress) -> None:
        """Write the layout of a new cluster, or that of the existing one with the ports and parts of now."""
        zeros = (0,) * (wanted.brokers or 3)  # ports to be chosen
        blank = Layout(kafka_uuid(), jars.KAFKA_VERSION, zeros, (), postgres_port=0, doors=wanted.doors)
        old = self.layout if self.exists else blank
        if wanted.brokers not in (None, len(old.broker_ports)):
            raise LocalError(
                f"the cluster in {self.folder} has {len(old.broker_ports)} brokers, not {wanted.brokers}",
                advice="Use --fresh to start an empty cluster, or --dir for a second one.",
            )
        with_postgres = old.postgres_port is not None if wanted.postgres is None else wanted.postgres
        with_registry = old.registry_port is not None if wanted.registry is None else wanted.registry
        # That they are installed is known before anything starts.
        if with_postgres:
            programs()
        if with_registry:
            progress("registry", f"Apicurio {jars.REGISTRY_VERSION} in {program().parent}")
        running = {part.port for part in self.parts() if part.process()} if self.exists else set[int]()
        pick = PortPicker()

        def choose(requested: int | None, before: int | None) -> int:
            if before and before in running and requested in (None, before):
                return pick.keep(before)
            if requested is not None:
                return pick.take(requested)
            return pick.again(before) if before else pick.free()

        broker_ports = tuple(
            choose(wanted.kafka_port + n if wanted.kafka_port else None, port)
            for n, port in enumerate(old.broker_ports)
        )
        # A live controller's port must not change under the others; with none alive, any will do.
        controller_ports = old.controller_ports
        if not running & set(old.broker_ports):
            controller_ports = tuple(pick.free() for _ in broker_ports)
        database = choose(wanted.postgres_port, old.postgres_port) if with_postgres else None
        registry = choose(wanted.registry_port, old.registry_port) if with_registry else None
        if old.postgres_port and not with_postgres:
            Postgres(self.folder / "postgres", old.postgres_port).stop()
        if old.registry_port and not with_registry:
            Registry(self.folder / "registry", old.registry_port).stop()
        new = replace(old, kafka_version=jars.KAFKA_VERSION, broker_ports=broker_ports)
        new = replace(new, controller_ports=controller_ports, postgres_port=database, registry_port=registry)
        new.write(self._file)

    def _start_brokers(self, progress: Progress) -> None:
        brokers = self.brokers()
        wanted = [broker for broker in brokers if not broker.process()]
        for broker in wanted:
            broker.prepare()
        blank = [broker for broker in wanted if not broker.formatted]
        if blank:
            progress(blank[0].name, "formatting storage")
            blank[0].format(self.layout.cluster_id)
            for broker in blank[1:]:
                broker.format_like(blank[0])
        for broker in wanted:
            broker.start()
            progress(broker.name, f"starting, pid {broker.pid}")
        self._await_brokers({broker.name for broker in brokers}, progress)
        if wanted:
            self._warm_up()
            progress("kafka", f"transactions and groups ready, bootstrap {self.bootstrap}")

    def _start_postgres(self, progress: Progress) -> None:
        postgres = self.postgres()
        if postgres is None:
            return
        if not postgres.process():
            postgres.prepare()
            postgres.start()
            progress(postgres.name, f"starting, pid {postgres.pid}")
        self._await_postgres(postgres)
        progress(postgres.name, f"ready at {postgres.url}")

    def _start_registry(self, progress: Progress) -> None:
        registry = self.registry()
        if registry is None:
            return
        if not registry.process():
            registry.prepare()
            registry.start()
            progress(registry.name, f"starting, pid {registry.pid}")
        registry.await_ready()
        progress(registry.name, f"ready at {registry.url}")

    def _await_brokers(self, names: set[str], progress: Progress = lambda _part, _text: None) -> None:
        waiting = {broker.number: broker for broker in self.brokers() if broker.name in names}
        client = metadata.admin(self.bootstrap)

        def ready() -> bool:
            for broker in waiting.values():
                broker.check_running()
            live: dict[int, str] = {}
            with suppress(SourceError):
                live = metadata.view(client, timeout_s=1).brokers
            for number in sorted(live.keys() & waiting.keys()):
                progress(waiting[number].name, f"ready at {waiting.pop(number).address}")
            return not waiting

        if waiting and not poll_until(ready, READY_TIMEOUT_S):
            late = next(iter(waiting.values()))
            raise LocalError(f"{late.name} is not ready after {READY_TIMEOUT_S} s", advice=f"See its log: {late.log}")

    def _await_postgres(self, postgres: Postgres) -> None:
        def ready() -> bool:
            postgres.check_running()
            return postgres.version() is not None

        if not poll_until(ready, READY_TIMEOUT_S, every_s=0.05):
            raise LocalError(f"postgres is not ready after {READY_TIMEOUT_S} s", advice=f"See its log: {postgres.log}")

    def _warm_up(self) -> None:
        """Make the internal topics of transactions and groups now, so that the first client does not wait."""
        quiet = {"bootstrap.servers": self.bootstrap, "enable.sparse.connections": "false"}
        producer = Producer({**quiet, "transactional.id": "avow-up"}, logger=metadata.QUIET)
        consumer = Consumer({**quiet, "group.id": "avow-up"}, logger=metadata.QUIET)
        try:
            producer.init_transactions(READY_TIMEOUT_S)
            consumer.committed([], timeout=READY_TIMEOUT_S)
        except KafkaException as error:
            raise LocalError(f"Kafka's internal topics are not ready: {error.args[0].str()}") from error
        finally:
            consumer.close()

    def _stop_all(self, progress: Progress) -> None:
        parts = self.parts()
        running = {part.name for part in parts if part.process()}
        # All are asked before any is waited for: a node that leaves alone moves its leaders for nothing.
        for part in parts:
            part.ask_to_stop()
        for part in parts:
            part.stop()
            progress(part.name, "stopped" if part.name in running else "was not running")


class PortPicker:
    """Hands out distinct ports that nothing listens on. A free one is given only once in a process: its owner may
    not listen yet."""

    _gone: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self._given: set[int] = set()

    def keep(self, port: int) -> int:
        self._given.add(port)
        return port

    def take(self, port: int) -> int:
        """A port that was asked for, or an error that names it."""
        if port in self._given or not _is_free(port):
            raise LocalError(
                f"port {port} is in use", advice="Choose another port, or omit the option to use a free one."
            )
        return self.keep(port)

    def again(self, port: int) -> int:
        """The port of last time if it is still free, so that addresses stay the same."""
        return self.keep(port) if port not in self._given and _is_free(port) else self.free()

    def free(self) -> int:
        for _ in range(1000):
            port = random.choice(PORTS)
            if port not in self._given | self._gone and _is_free(port):
                self._gone.add(port)
                return self.keep(port)
        raise LocalError(f"no free port between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def disk_use(folder: Path) -> int:
    """Bytes really taken on disk: Kafka's index files are sparse."""
    total = 0
    for path, folders, files in os.walk(folder):  # with thousands of partitions, pathlib takes seconds
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # it was deleted while we looked
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return total
