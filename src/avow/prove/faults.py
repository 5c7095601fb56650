"""The faults: each does its harm, heals it, and can say how it knows that it happened.

A fault is a context manager: entering does it, leaving heals it. ``fired()`` gives the proof in words, or nothing if
there is none; then the cell is unknown, for a fault that did not happen proves nothing. Whatever a fault has to choose
it chooses from its seed.

Owns: how harm is done. Must not know: guarantees' verdicts or how the outcome is read. Neighbours: ``cells`` (the table
of faults by name), ``scene`` (what is hurt).
"""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from signal import SIGKILL, SIGQUIT
from types import MappingProxyType
from typing import ClassVar, Self

import psutil
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from avow.engines import failpoints
from avow.errors import SourceError
from avow.guarantee import Guarantee
from avow.kafka import metadata
from avow.prove.driver import await_gone
from avow.prove.proxy import Counts, LostReply, Proxy, Way
from avow.prove.scene import Scene
from avow.prove.workload import Workload

WAIT_S = 90


class CannotRun(Exception):
    """This machine cannot do the fault. The cell is not run, and this says why."""


class Fault(ABC):
    """Base of all. ``seed`` decides what is open; ``hold_s`` is how long it lasts."""

    transactions: ClassVar[bool] = False  # whether the workload is to be in transactions
    records_least: ClassVar[int] = 0

    def __init__(self, scene: Scene, seed: int, hold_s: float) -> None:
        self.scene = scene
        self.site = scene.site
        self.hold_s = hold_s
        self.chance = random.Random(seed)
        self.env: dict[str, str] = {}  # for the driver that is to be hurt

    def prepare(self) -> None:
        """Before the topic is there and the first driver starts."""
        return None

    def make_topic(self, partitions: int) -> None:
        self.site.make_topic(self.scene.topic, partitions)

    @abstractmethod
    def inject(self) -> None:
        """Do it."""

    def hold(self) -> None:
        self.scene.sleep(self.hold_s)

    def heal(self) -> None:
        """Nothing by default: what died is started again by the runner."""
        return None

    def close(self) -> None:
        """After the verdict: take away what the fault needed."""
        return None

    @abstractmethod
    def fired(self) -> str:
        """The proof that it happened, or nothing."""

    def __enter__(self) -> Self:
        self.inject()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()


# The driver and what it started.


class KilledAt(Fault):
    """kill -9 of the run by itself, at a named point between its acts."""

    act: ClassVar[str]

    @property
    def point(self) -> str:
        if self.act == "mid-write":
            return self.act
        # In one atomic act there is no point between the two: the nearest is right after its COMMIT.
        return "after-claim-write" if self.scene.cell.guarantee is Guarantee.EXACTLY_ONCE else f"after-{self.act}"

    def prepare(self) -> None:
        self._folder = Path(self.scene.folder, f"failpoint-{self.chance.randrange(10**9)}")
        self._folder.mkdir()
        self.env = {failpoints.VARIABLE: f"{self.point}:1:run:{self._folder}"}

    def inject(self) -> None:
        self._driver = self.scene.driver
        if not self.scene.driver_has(self.env):  # a later round: the driver that runs is not armed
            self._driver.stop()
            self._driver = self.scene.start(env=self.env)
        self.scene.until(lambda: not self._driver.alive, WAIT_S)

    def fired(self) -> str:
        marked = (self._folder / f"fired-{self.point}").exists()
        if marked and self._driver.code == -SIGKILL:
            return f"pid {self._driver.pid} died of SIGKILL at {self.point}"
        return ""


class KilledAfterClaim(KilledAt):
    act = "claim"


class KilledAfterWrite(KilledAt):
    act = "write"


class KilledInMidWrite(KilledAt):
    act = "mid-write"


class KilledAtRandom(Fault):
    """The driver with all it started, or the Python driver alone: then its JVM and tasks live on for a moment."""

    def inject(self) -> None:
        self._driver = self.scene.driver
        self._alone = self.chance.random() < 0.5
        if self._alone:
            self._driver.kill_alone()
        else:
            self._driver.kill()

    def hold(self) -> None:
        """None: the sooner the next driver starts, the more of the last may still be alive."""

    def fired(self) -> str:
        if self._driver.code != -SIGKILL:
            return ""
        return f"driver {self._driver.pid} {'alone' if self._alone else 'and all it started'} died of SIGKILL"


class Zombie(Fault):
    """The driver and all it started stand still, a second driver takes over, then the first wakes up."""

    def inject(self) -> None:
        self._first = self.scene.driver
        self._was_paused = self._first.pause()
        self._at = self.scene.claimed()
        self.scene.start()
        self._moved = self.scene.until_claimed_more(self._at)

    def heal(self) -> None:
        self._first.resume()
        self._first.wait(60)

    def fired(self) -> str:
        if not (self._was_paused and self._moved):
            return ""
        return f"pid {self._first.pid} stood still while another claimed; woken, it ended with {self._first.code}"


class TwoDrivers(Fault):
    def inject(self) -> None:
        self._first = self.scene.driver
        alive = self._first.alive
        second = self.scene.start()
        self._both = alive and self._first.alive and second.alive
        self._moved = self.scene.until_claimed_more(self.scene.claimed())

    def heal(self) -> None:
        self._first.wait(60)

    def fired(self) -> str:
        if not self._both:
            return ""
        return f"two drivers were alive at once; the first ended with {self._first.code}"


class _ProcessKilled(Fault):
    """kill -9 of one process that the driver started."""

    what: ClassVar[str]
    _killed: int | None = None  # the pid, once it is gone

    @abstractmethod
    def victims(self) -> list[psutil.Process]:
        """Whom it hits."""

    def inject(self) -> None:
        self.scene.until(lambda: bool(self.victims()) or not self.scene.driver.alive, WAIT_S)
        found = self.victims()
        if found:
            victim = self.chance.choice(sorted(found, key=lambda one: one.pid))
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(SIGKILL)
                self._killed = victim.pid if await_gone(victim) else None

    def fired(self) -> str:
        return f"pid {self._killed} of the driver's {self.what} died of SIGKILL" if self._killed else ""


class WorkerKilled(_ProcessKilled):
    what = "Python workers"

    def victims(self) -> list[psutil.Process]:
        return self.scene.driver.workers()


class JvmKilled(_ProcessKilled):
    what = "processes, the JVM,"

    def victims(self) -> list[psutil.Process]:
        jvm = self.scene.driver.jvm()
        return [jvm] if jvm else []


# The brokers.


class _BrokersKilled(Fault):
    """kill -9 of some brokers; they are started again at the heal."""

    @abstractmethod
    def chosen(self) -> list[int]:
        """Whom it hits."""

    def aftermath(self) -> str:
        """What the rest of the cluster did about it; nothing if it did not notice."""
        return "gone"

    def inject(self) -> None:
        self._numbers = self.chosen()
        self._pids = [self.site.broker(number).pid for number in self._numbers]
        for number in self._numbers:
            self.site.broker(number).kill()
        self._gone = all(pid and not psutil.pid_exists(pid) for pid in self._pids)
        self._aftermath = ""

    def hold(self) -> None:
        super().hold()
        self.scene.until(lambda: bool(self._look()), 20)

    def _look(self) -> str:
        with suppress(SourceError):
            self._aftermath = self.aftermath()
        return self._aftermath

    def heal(self) -> None:
        self.site.cluster.up()

    def fired(self) -> str:
        if not (self._gone and self._aftermath):
            return ""
        names = ", ".join(f"broker-{n} (pid {pid})" for n, pid in zip(self._numbers, self._pids, strict=True))
        return f"{names} died of SIGKILL; {self._aftermath}"


class LeaderKilled(_BrokersKilled):
    def chosen(self) -> list[int]:
        self._partition = self.chance.choice(self.site.partitions(self.scene.topic))
        return [self._partition.leader]

    def aftermath(self) -> str:
        now = self.site.partitions(self.scene.topic)[self._partition.partition].leader
        return (
            f"partition {self._partition.partition} is led by broker-{now}" if now not in (-1, *self._numbers) else ""
        )


class ControllerKilled(_BrokersKilled):
    def chosen(self) -> list[int]:
        self._epoch, number = _controller(self.scene)
        return [number]

    def aftermath(self) -> str:
        epoch, number = _controller(self.scene)
        return f"broker-{number} became the controller, epoch {epoch}" if epoch > self._epoch else ""


def _controller(scene: Scene) -> tuple[int, int]:
    """(epoch, broker): from the logs. What Kafka tells its clients in KRaft is any broker."""
    found = [
        (int(epoch), broker.number)
        for broker in scene.site.cluster.brokers()
        for epoch in re.findall(
            r"Becoming the active controller at epoch (\d+)", broker.log.read_text(errors="replace")
        )
    ]
    return max(found)


class AllBrokersKilled(_BrokersKilled):
    def chosen(self) -> list[int]:
        return [broker.number for broker in self.site.cluster.brokers()]


class BrokerPaused(Fault):
    _fenced = False

    def inject(self) -> None:
        self._number = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        self.site.broker(self._number).pause()

    def hold(self) -> None:
        super().hold()
        self._fenced = self.scene.until(self._missing, 15)

    def _missing(self) -> bool:
        with suppress(SourceError):
            others = ",".join(b.address for b in self.site.cluster.brokers() if b.number != self._number)
            return self._number not in metadata.view(metadata.admin(others), timeout_s=2).brokers
        return False

    def heal(self) -> None:
        self.site.broker(self._number).resume()
        self.site.cluster.start(f"broker-{self._number}")

    def fired(self) -> str:
        return f"broker-{self._number} missed its heartbeats, and the others went on without it" if self._fenced else ""


# The network.


class _Network(Fault):
    """Something that proxies do. ``fired`` looks at what they counted."""

    def proxies(self) -> list[Proxy]:
        return list(self.site.clients.values())

    def counted(self) -> Counts:
        return _sum(proxy.counts for proxy in self.proxies())

    def inject(self) -> None:
        self._before = self.counted()
        self.harm()

    @abstractmethod
    def harm(self) -> None:
        """Do it."""

    def heal(self) -> None:
        self._after = self.counted()
        for proxy in self.proxies():
            proxy.heal()

    def did(self, count: str) -> int:
        return int(getattr(self._after, count) - getattr(self._before, count))


def _sum(counts: Iterable[Counts]) -> Counts:
    columns = zip(*(astuple(one) for one in counts), strict=True)
    return Counts(*(sum(column) for column in columns))


class CutFromBrokers(_Network):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.cut()

    def fired(self) -> str:
        cut, refused = self.did("cut"), self.did("refused")
        return f"{cut} connections to brokers cut, {refused} new ones refused" if cut and refused else ""


class BrokersOneWay(_Network):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.hold(Way.DOWN)

    def fired(self) -> str:
        held = self.did("held_bytes")
        return f"{held:,} bytes of the brokers' answers held back" if held else ""


class BrokersSlow(_Network):
    def harm(self) -> None:
        for proxy in self.proxies():
            proxy.delay(0.2)

    def fired(self) -> str:
        return f"{self.did('delayed'):,} chunks came 200 ms late" if self.did("delayed") else ""


class _BrokersApart(_Network):
    """Brokers are cut from each other. The controller still hears all of them: a grey failure, not a dead node."""

    _shrank = ""

    def proxies(self) -> list[Proxy]:
        return [*self.site.peers.values(), *self.site.clients.values()]

    def hold(self) -> None:
        super().hold()
        self.scene.until(self._look, 15)

    def _look(self) -> bool:
        with suppress(SourceError):
            for partition in self.site.partitions(self.scene.topic):
                if partition.under_replicated:
                    self._shrank = f"partition {partition.partition} has {partition.in_sync} in sync"
        return bool(self._shrank)

    def heal(self) -> None:
        super().heal()
        # Whole again before the next fault: two at once could leave no replica that is in sync.
        self.scene.until(lambda: not any(p.under_replicated for p in self.site.partitions(self.scene.topic)), 30)

    def fired(self) -> str:
        cut = self.did("cut") + self.did("refused")
        return f"{cut} connections cut or refused; {self._shrank}" if cut and self._shrank else ""


class BrokerCutOff(_BrokersApart):
    def harm(self) -> None:
        number = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        own = self.site.comes_from(number)
        for other, proxy in self.site.peers.items():
            proxy.cut(None if other == number else own)
        self.site.clients[number].cut()


class BrokersCutApart(_BrokersApart):
    def harm(self) -> None:
        one = self.chance.choice(self.site.partitions(self.scene.topic)).leader
        other = self.chance.choice([number for number in self.site.peers if number != one])
        self.site.peers[one].cut(self.site.comes_from(other))
        self.site.peers[other].cut(self.site.comes_from(one))


# PostgreSQL.


class PostgresKilled(Fault):
    def inject(self) -> None:
        self._pid = self.site.postgres.pid
        self.end()
        self._gone = bool(self._pid) and not psutil.pid_exists(self._pid or 0)

    def end(self) -> None:
        self.site.postgres.kill()

    def heal(self) -> None:
        self.site.cluster.start("postgres")

    def fired(self) -> str:
        return f"PostgreSQL, pid {self._pid}, was gone" if self._gone else ""


class PostgresImmediate(PostgresKilled):
    """Its own "immediate" shutdown: no checkpoint, every session ended at once."""

    def end(self) -> None:
        process = self.site.postgres.process()
        if process:
            process.send_signal(SIGQUIT)
            self.scene.until(lambda: self.site.postgres.process() is None, 30)


class PostgresCut(_Network):
    def proxies(self) -> list[Proxy]:
        return [self.site.database]

    def harm(self) -> None:
        self.site.database.cut()

    def fired(self) -> str:
        cut = self.did("cut")
        return f"{cut} connections to PostgreSQL cut, {self.did('refused')} new ones refused" if cut else ""


class CommitReplyLost(_Network):
    """PostgreSQL commits rows, and its answer never arrives: the task cannot know."""

    def proxies(self) -> list[Proxy]:
        return [self.site.database]

    def harm(self) -> None:
        self.site.database.lose_replies(LostReply(b"COMMIT", b"COPY", b"COMMIT", times=2))

    def hold(self) -> None:
        before = self._before.lost_replies
        self.scene.until(lambda: self.site.database.counts.lost_replies > before, 30)
        super().hold()

    def fired(self) -> str:
        lost = self.did("lost_replies")
        return f"PostgreSQL answered COMMIT {lost} times, and the task never heard it" if lost else ""


class LakeCommitUnknown(Fault):
    """The table took a commit in, and the driver never hears of it."""

    def prepare(self) -> None:
        self._folder = Path(self.scene.folder, f"failpoint-{self.chance.randrange(10**9)}")
        self._folder.mkdir()
        self.env = {failpoints.VARIABLE: f"commit-unknown:1:answer:{self._folder}"}

    def inject(self) -> None:
        if not self.scene.driver_has(self.env):
            self.scene.driver.stop()
            self.scene.start(env=self.env)
        self.scene.until(lambda: bool(self.fired()) or not self.scene.driver.alive, WAIT_S)

    def fired(self) -> str:
        marked = (self._folder / "fired-commit-unknown").exists()
        return "a commit was made, and its answer was lost" if marked else ""


# Disks and folders.


class _SmallDisk(Fault):
    """A small tmpfs, filled to the last byte while the fault holds."""

    size_mb: ClassVar[int] = 24

    def mount(self, folder: Path, owner: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={self.size_mb}m"
        if owner and os.geteuid() == 0:
            options += f",uid={pwd.getpwnam(owner).pw_uid},mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "avow-prove", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotRun(f"no small disk can be made here: {error}") from error
        if done.returncode:
            raise CannotRun(f"no small disk can be made here: {done.stderr.strip()}")
        self._disk: Path | None = folder

    def fill(self, folder: Path) -> None:
        self._ballast = folder / "ballast"
        with suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass

    def heal(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        if getattr(self, "_disk", None):
            subprocess.run(["umount", "-l", str(self._disk)], capture_output=True, check=False)
            self._disk = None


FULL = "No space left on device"


class DiskFullDatabase(_SmallDisk):
    """The table moves to a small disk, which is then full: COPY fails until there is room again."""

    def prepare(self) -> None:
        self._space = f"small_{self.chance.randrange(10**9)}"
        self._folder = self.site.postgres.folder / self._space
        self.mount(self._folder, "nobody")

    def inject(self) -> None:
        self._log_size = self.site.postgres.log.stat().st_size
        data = self._folder / "data"
        data.mkdir()
        owner = self.site.postgres.identity()
        if owner:
            os.chown(data, owner["user"], owner["group"])
        self.scene.execute(f"CREATE TABLESPACE {self._space} LOCATION '{data}'")
        self.scene.execute(f'ALTER TABLE "{self.scene.table}" SET TABLESPACE {self._space}')
        self.fill(self._folder)

    def hold(self) -> None:
        self.scene.until(lambda: bool(self.fired()), 30)
        super().hold()

    def fired(self) -> str:
        with self.site.postgres.log.open("rb") as file:
            file.seek(self._log_size)
            count = file.read().count(FULL.encode())
        return f'PostgreSQL said "{FULL}" {count} times' if count else ""

    def close(self) -> None:
        with suppress(Exception):
            self.scene.execute(f'ALTER TABLE "{self.scene.table}" SET TABLESPACE pg_default')
            self.scene.execute(f"DROP TABLESPACE {self._space}")
        self.unmount()


class DiskFullLake(_SmallDisk):
    """The lake is on a small disk, which is then full: neither a file nor a commit can be written."""

    size_mb = 64

    def prepare(self) -> None:
        self.mount(self.scene.folder / "lake")

    def inject(self) -> None:
        self._driver = self.scene.driver
        self.fill(self.scene.folder / "lake")

    def hold(self) -> None:
        self.scene.until(lambda: bool(self.fired()) or not self._driver.alive, 30)
        super().hold()

    def fired(self) -> str:
        return f'the run said "{FULL}"' if self._driver.says(FULL) else ""

    def close(self) -> None:
        self.unmount()


class DiskFullCheckpoint(_SmallDisk):
    def prepare(self) -> None:
        self.mount(self.scene.temporary)

    def inject(self) -> None:
        self._driver = self.scene.driver
        self.fill(self.scene.temporary)

    def hold(self) -> None:
        self.scene.until(lambda: bool(self.fired()) or not self._driver.alive, 30)
        super().hold()

    def fired(self) -> str:
        return f'the run said "{FULL}"' if self._driver.says(FULL) else ""

    def close(self) -> None:
        self.unmount()


class _Checkpoint(Fault):
    """Something is done to Spark's checkpoint under a running query."""

    _done = ""

    def inject(self) -> None:
        self.scene.until(lambda: len(self._offsets()) > 1 or not self.scene.driver.alive, WAIT_S)
        for _ in range(50):  # Spark writes here too: try until the harm is really there
            with suppress(OSError):
                self._done = self.harm()
            if self._done:
                break

    def _offsets(self) -> list[Path]:
        """The batches' offset files, oldest first."""
        found = self.scene.temporary.glob("avow-checkpoint-*/offsets/*")
        return sorted((path for path in found if path.name.isdigit()), key=lambda path: int(path.name))

    @abstractmethod
    def harm(self) -> str:
        """Do it."""

    def fired(self) -> str:
        return self._done


class CheckpointDeleted(_Checkpoint):
    def harm(self) -> str:
        (folder, *_) = {path.parent.parent for path in self._offsets()}
        shutil.rmtree(folder)
        return f"{folder.name} was there and is gone"


class CheckpointRewound(_Checkpoint):
    def harm(self) -> str:
        newest = self._offsets()[-1]
        for path in (newest, newest.parent.parent / "commits" / newest.name):
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        return "" if newest.exists() else f"batch {newest.name} is gone from the checkpoint"


class CheckpointTorn(_Checkpoint):
    def harm(self) -> str:
        newest = self._offsets()[-1]
        size = newest.stat().st_size
        os.truncate(newest, size // 2)
        return f"offsets/{newest.name} cut from {size} to {size // 2} bytes"


# The topic. After the first three the run must stop, with a name for it.


class Retention(Fault):
    _passed = ""

    def inject(self) -> None:
        self.scene.driver.stop()
        self.scene.workload.stop()
        self.scene.workload.burst(400)
        positions, ends = self.scene.positions(), self.site.ends(self.scene.topic)
        goals = {n: (positions.get(n, 0) + end + 1) // 2 for n, end in ends.items()}
        client = self.site.admin()
        asked = client.delete_records([TopicPartition(self.scene.topic, n, goal) for n, goal in goals.items()])
        earliest = {where.partition: done.result().low_watermark for where, done in asked.items()}
        passed = [n for n, low in earliest.items() if low > positions.get(n, 0)]
        if passed:
            n = passed[0]
            self._passed = f"partition {n} begins at {earliest[n]}, and the position is {positions.get(n, 0)}"

    def fired(self) -> str:
        return self._passed


class TopicRecreated(Fault):
    _outgrown = ""

    def inject(self) -> None:
        scene = self.scene
        scene.driver.stop()
        scene.workload.stop()
        before = self.site.ends(scene.topic)
        client = self.site.admin()
        client.delete_topics([scene.topic], operation_timeout=30)[scene.topic].result()
        scene.until(self._made_again, 60)
        # Numbers that the first life never had: one of them in the table would be a phantom.
        count = sum(before.values()) + 100 * len(before)
        again = Workload(
            *(self.site.bootstrap, scene.topic),
            partitions=len(before),
            records=0,
            rate=1,
            first=100_000_000,
            value=scene.form.value,
        )
        again.burst(count)
        after = self.site.ends(scene.topic)
        if all(after[n] > before[n] for n in before):
            self._outgrown = f"made again, it ends at {sum(after.values())}, and ended at {sum(before.values())} before"

    def _made_again(self) -> bool:
        with suppress(KafkaException):
            self.site.make_topic(self.scene.topic, self.scene.workload.partitions)
            return True
        return False

    def fired(self) -> str:
        return self._outgrown


class LogTruncated(Fault):
    """An unclean leader election: the only replica left is one that missed records which were claimed."""

    _cut = ""

    def make_topic(self, partitions: int) -> None:
        self._stale, self._leader = self.chance.sample([1, 2, 3], 2)
        config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
        replicas = [[self._leader, self._stale]] * partitions
        topic = NewTopic(self.scene.topic, partitions, replica_assignment=replicas, config=config)
        client = self.site.admin()
        client.create_topics([topic], operation_timeout=30)[self.scene.topic].result()

    def inject(self) -> None:
        scene, site = self.scene, self.site
        site.broker(self._stale).kill()
        scene.until(lambda: self._alone(self._leader), 40)
        before = site.ends(scene.topic)
        moved = sum(before.values()) + 200
        scene.until(lambda: scene.claimed() > moved, WAIT_S)
        scene.workload.stop()
        scene.until(scene.caught_up, 60)
        scene.driver.stop()
        site.broker(self._leader).kill()
        site.cluster.start(f"broker-{self._stale}")
        scene.until(lambda: self._led_by(self._stale), 60)
        site.cluster.up()
        positions, ends = scene.positions(), site.ends(scene.topic)
        short = [n for n, end in ends.items() if end < positions.get(n, 0)]
        if short:
            n = short[0]
            self._cut = f"partition {n} ends at {ends[n]}, and the position is {positions[n]}"

    def _alone(self, number: int) -> bool:
        with suppress(SourceError):
            return all(p.in_sync == (number,) for p in self.site.partitions(self.scene.topic))
        return False

    def _led_by(self, number: int) -> bool:
        with suppress(SourceError):
            return all(p.leader == number for p in self.site.partitions(self.scene.topic))
        return False

    def fired(self) -> str:
        return self._cut


class PartitionsAdded(Fault):
    def inject(self) -> None:
        workload, topic = self.scene.workload, self.scene.topic
        self._new = workload.partitions
        client: AdminClient = self.site.admin()
        client.create_partitions([NewPartitions(topic, self._new + 1)])[topic].result()
        self.scene.until(lambda: len(self.site.partitions(topic)) > self._new, 30)
        self.scene.sleep(2)  # until the producer has looked again
        workload.partitions = self._new + 1

    def fired(self) -> str:
        there = sum(1 for one in self.scene.workload.sent() if one.partition == self._new and one.offset >= 0)
        return f"{there} records are in the new partition {self._new}" if there else ""


class UpstreamAborts(Fault):
    transactions = True

    def inject(self) -> None:
        """The workload does it."""

    def fired(self) -> str:
        aborted = self.scene.workload.aborted
        return f"{aborted} transactions were aborted" if aborted else ""


# Canaries: a pipeline that breaks its word.


class CanarySwapped(KilledAfterClaim):
    """The acts in the wrong order: a crash after the claim loses records that at-least-once may not lose."""

    def prepare(self) -> None:
        super().prepare()
        self.env[failpoints.CANARY] = "swap"


class _CanarySink(Fault):
    sabotage: ClassVar[str]
    records_least = 24_000  # one in 10,000 of each of two partitions

    def prepare(self) -> None:
        self.env = {failpoints.CANARY: f"{self.sabotage}:10000"}

    def inject(self) -> None:
        """The sink does it, all the time; it needs as many records as that takes."""
        self.scene.workload.burst(self.records_least)

    def fired(self) -> str:
        return f"the sink would {self.sabotage} one record in 10,000"


class CanaryDrops(_CanarySink):
    sabotage = "drop"


class CanaryDoubles(_CanarySink):
    sabotage = "double"


BUILT: Mapping[str, Callable[[Scene, int, float], Fault]] = MappingProxyType(
    {
        "killed-after-claim": KilledAfterClaim,
        "killed-after-write": KilledAfterWrite,
        "killed-in-mid-write": KilledInMidWrite,
        "killed-at-random": KilledAtRandom,
        "zombie": Zombie,
        "two-drivers": TwoDrivers,
        "worker-killed": WorkerKilled,
        "jvm-killed": JvmKilled,
        "leader-killed": LeaderKilled,
        "controller-killed": ControllerKilled,
        "broker-paused": BrokerPaused,
        "all-brokers-killed": AllBrokersKilled,
        "broker-cut-off": BrokerCutOff,
        "brokers-cut-apart": BrokersCutApart,
        "cut-from-brokers": CutFromBrokers,
        "brokers-one-way": BrokersOneWay,
        "brokers-slow": BrokersSlow,
        "postgres-killed": PostgresKilled,
        "postgres-immediate": PostgresImmediate,
        "postgres-cut": PostgresCut,
        "commit-reply-lost": CommitReplyLost,
        "lake-commit-unknown": LakeCommitUnknown,
        "disk-full-database": DiskFullDatabase,
        "disk-full-lake": DiskFullLake,
        "disk-full-checkpoint": DiskFullCheckpoint,
        "checkpoint-deleted": CheckpointDeleted,
        "checkpoint-rewound": CheckpointRewound,
        "checkpoint-torn": CheckpointTorn,
        "retention": Retention,
        "topic-recreated": TopicRecreated,
        "log-truncated": LogTruncated,
        "partitions-added": PartitionsAdded,
        "upstream-aborts": UpstreamAborts,
        "canary-swapped": CanarySwapped,
        "canary-drops": CanaryDrops,
        "canary-doubles": CanaryDoubles,
    }
)
