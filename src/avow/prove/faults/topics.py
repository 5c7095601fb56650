"""The topic and what is in it. After retention, re-creation and truncation the run must stop, with a name for it."""

from __future__ import annotations

from contextlib import suppress

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from avow.errors import SourceError
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
        scene = self.scene
        scene.driver.stop()
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


class UpstreamAborts(Fault):
    transactions = True

    def inject(self) -> None:
        """The workload does it."""

    def fired(self) -> str:
        aborted = self.scene.workload.aborted
        return f"{aborted} transactions were aborted" if aborted else ""
