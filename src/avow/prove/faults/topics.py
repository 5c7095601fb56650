"""The topic and what is in it. After retention, re-creation and truncation the run must stop, with a name for it."""

from __future__ import annotations

import json
from contextlib import suppress
from types import MappingProxyType

from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from avow.errors import SourceError
from avow.guarantee import Guarantee
from avow.prove.check import read_places
from avow.prove.driver import Driver
from avow.prove.faults.base import WAIT_S, Fault
from avow.prove.workload import Workload


class Retention(Fault):
    _passed = ""

    def inject(self) -> None:
        self.scene.driver.stop()
        self.scene.workload.stop()
        self.scene.workload.burst(400)
        positions, ends = self.scene.witness.positions(), self.site.ends(self.scene.topic)
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
        self.scene.driver.stop()
        self.recreate()

    def recreate(self) -> None:
        scene = self.scene
        scene.workload.stop()
        before = self.site.ends(scene.topic)
        client = self.site.admin()
        client.delete_topics([scene.topic], operation_timeout=30)[scene.topic].result()
        scene.until(lambda: self._made_again(len(before)), 60)
        # Numbers that the first life never had: one of them in the table would be a phantom. They are spread evenly,
        # which those of a topic that goes through several faults are not.
        count = (max(before.values()) + 100) * len(before)
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

    def _made_again(self, partitions: int) -> bool:
        with suppress(KafkaException):
            self.site.make_topic(self.scene.topic, partitions)
            return True
        return False

    def fired(self) -> str:
        return self._outgrown


class TopicRecreatedLive(TopicRecreated):
    """The run goes on reading meanwhile, and must not take the new topic's records for the old one's."""

    def inject(self) -> None:
        driver = self.scene.driver
        # Not all of it is read: a run that has caught up has nothing to mistake.
        self.scene.workload.burst(3_000)
        self.recreate()
        self.scene.until(lambda: not driver.alive, WAIT_S)


class OutputRecreatedLive(Fault):
    """The topic that a run writes to. What it held is gone, and a run that went on would hide that."""

    _made = _now = ""

    def inject(self) -> None:
        scene, output = self.scene, self.scene.witness.table
        if scene.follower is not None:  # for who reads it, it vanishes, whatever the run does
            scene.follower.stop()
            scene.follower = None
        driver, before, was = scene.driver, self.site.ends(output), self._id(output)
        scene.workload.burst(3_000)
        client = self.site.admin()
        client.delete_topics([output], operation_timeout=30)[output].result()
        scene.until(lambda: self._made_again(output, len(before), was), 60)
        if self._now:
            self._made = f"the output held {sum(before.values())} offsets as topic id {was}, and has id {self._now} now"
        scene.until(lambda: not driver.alive, WAIT_S)

    def _made_again(self, output: str, partitions: int, was: str) -> bool:
        with suppress(KafkaException):  # brokers make a topic by themselves that a producer asks for
            self.site.make_topic(output, partitions)
        found = self._id(output)
        self._now = found if found != was else ""  # one broker may still know the one before, or none at all
        return bool(self._now)

    def _id(self, topic: str) -> str:
        with suppress(KafkaException):
            client = self.site.admin()
            return str(client.describe_topics(TopicCollection([topic]))[topic].result().topic_id)
        return ""

    def fired(self) -> str:
        return self._made

    def violation(self) -> str:
        """Under the weaker words one batch may be written outside of any transaction before its end is refused."""
        if self.scene.cell.guarantee is not Guarantee.EXACTLY_ONCE:
            return ""
        there = len(read_places(self.site.bootstrap, self.scene.witness.table))
        return f"{there:,} records were committed into the output that was made again" if there else ""


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
        if self.scene.witness.output_topic:
            # The pipeline would give its output two replicas, as the source has, and could not write with one away.
            self.site.make_topic(self.scene.witness.table, partitions)

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
        positions, ends = scene.witness.positions(), site.ends(scene.topic)
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


class PartitionAddedBetweenRuns(Fault):
    """Under ``start = "latest"`` that partition's records are not of the time before the pipeline, and must come."""

    declares = MappingProxyType({"source": MappingProxyType({"start": "latest"})})

    def before_load(self) -> None:
        code = self.scene.start("--once").wait(WAIT_S)
        self.scene.require(code == 0, f"the run on the empty topic ended with {code}: {self.scene.driver.last_words()}")

    def inject(self) -> None:
        scene, workload = self.scene, self.scene.workload
        scene.driver.stop()
        self._new = workload.partitions
        client: AdminClient = self.site.admin()
        client.create_partitions([NewPartitions(scene.topic, self._new + 1)])[scene.topic].result()
        scene.until(lambda: len(self.site.partitions(scene.topic)) > self._new, 30)
        scene.sleep(2)  # until the producer has asked for metadata again
        workload.partitions = self._new + 1
        scene.until(lambda: self._there() > 50, 30)
        self._before_start = self._there()
        scene.start()

    def _there(self) -> int:
        return sum(1 for one in self.scene.workload.sent() if one.partition == self._new and one.offset >= 0)

    def fired(self) -> str:
        there = self._before_start
        return f"{there} records were in the new partition {self._new} before the next run began" if there else ""


class RefusedStart(Fault):
    """The same pipeline with one more topic, whose declared start is outside its log."""

    _code: int | None = None
    _went_on = False

    def inject(self) -> None:
        scene, other = self.scene, f"{self.scene.topic}-more"
        with suppress(KafkaException):  # it is there already, if the fault comes twice
            self.site.make_topic(other, 1)
        text = scene.file.read_text(encoding="utf-8")
        start = f'"topics" = {json.dumps([scene.topic, other])}, "start" = {{"{other}" = {{"0" = 1000000}}}}'
        self._file = scene.folder / "refused.toml"
        self._file.write_text(text.replace(f'"topics" = ["{scene.topic}"]', start))
        self._driver = scene.driver
        log = scene.folder / "refused.log"
        env = {"DATABASE_URL": self.site.pipeline_url, "TMPDIR": str(scene.temporary)}
        refused = Driver(["run", str(self._file)], log, env)
        try:
            self._code = refused.wait(WAIT_S)
            self._why = refused.last_words()
        finally:
            refused.end()

    def hold(self) -> None:
        before = self.scene.claimed()
        self._went_on = self.scene.until_claimed_more(before) and self._driver.alive
        super().hold()

    def close(self) -> None:
        with suppress(KafkaException):
            self.site.drop_topic(f"{self.scene.topic}-more")

    def fired(self) -> str:
        return f"a second start was refused with {self._code} ({self._why})" if self._code else ""

    def violation(self) -> str:
        return "" if self._went_on else f"the healthy run ended with {self._driver.code} after a refused start"


class UpstreamAborts(Fault):
    transactions = True

    def inject(self) -> None:
        """The workload does it."""

    def fired(self) -> str:
        aborted = self.scene.workload.aborted
        return f"{aborted} transactions were aborted" if aborted else ""
