"""The topic and what is in it. After retention, re-creation and truncation the run must stop, with a name for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from avow.errors import SourceError
from avow.guarantee import Guarantee
from avow.kafka.metadata import Partition, TopicPartition
from avow.prove.check import read_places
from avow.prove.faults.base import WAIT_S, Fault
from avow.prove.workload import Workload


class Retention(Fault):
    def inject(self) -> None:
        self.scenario.driver.stop()
        self.scenario.workload.stop()
        self.scenario.workload.burst(400)
        positions, ends = self.scenario.oracle.positions(), self.cluster.ends(self.scenario.topic)
        goals = {n: (positions.get(n, 0) + end + 1) // 2 for n, end in ends.items()}
        deleted = self.cluster.admin().delete_records(
            {TopicPartition(self.scenario.topic, n): to for n, to in goals.items()}
        )
        earliest = {tp.partition: low for tp, low in deleted.items()}
        for n, low in earliest.items():
            if low > positions.get(n, 0):
                self.proof = f"partition {n} begins at {low}, and the position is {positions.get(n, 0)}"
                break


class TopicRecreatedFault(Fault):
    def inject(self) -> None:
        self.scenario.driver.stop()
        self.recreate()

    def recreate(self) -> None:
        scenario = self.scenario
        scenario.workload.stop()
        before = self.cluster.ends(scenario.topic)
        self.cluster.admin().delete_topic(scenario.topic)
        scenario.wait_until(lambda: self.cluster.make_topic(scenario.topic, len(before)), 60)
        # Numbers that the first life never had: one of them in the table would be a phantom. They are spread evenly,
        # which those of a topic that goes through several faults are not.
        workload = Workload(
            *(self.cluster.bootstrap, scenario.topic),
            partitions=len(before),
            records=0,
            rate=1,
            first=100_000_000,
            value=scenario.spec.value,
        )
        workload.burst((max(before.values()) + 100) * len(before))
        after = self.cluster.ends(scenario.topic)
        if all(after[n] > before[n] for n in before):
            self.proof = (
                f"the recreated topic ends at {sum(after.values())}, the old one ended at {sum(before.values())}"
            )


class TopicRecreatedLive(TopicRecreatedFault):
    """The run goes on reading meanwhile, and must not take the new topic's records for the old one's."""

    def inject(self) -> None:
        driver = self.scenario.driver
        # Not all of it is read: a run that has caught up has nothing to mistake.
        self.scenario.workload.burst(3_000)
        self.recreate()
        self.scenario.wait_until(lambda: not driver.alive, WAIT_S)


class OutputRecreatedLive(Fault):
    """The topic that a run writes to. What it held is gone, and a run that went on would hide that."""

    _now = ""

    def inject(self) -> None:
        scenario, output = self.scenario, self.scenario.oracle.table
        if scenario.live_reader is not None:  # for who reads it, it vanishes, whatever the run does
            scenario.live_reader.stop()
            scenario.live_reader = None
        driver, before, was = scenario.driver, self.cluster.ends(output), self._id(output)
        scenario.workload.burst(3_000)
        self.cluster.admin().delete_topic(output)
        scenario.wait_until(lambda: self._made_again(output, len(before), was), 60)
        if self._now:
            self.proof = f"the output held {sum(before.values())} offsets as topic id {was}, and now has id {self._now}"
        scenario.wait_until(lambda: not driver.alive, WAIT_S)

    def _made_again(self, output: str, partitions: int, was: str) -> bool:
        self.cluster.make_topic(output, partitions)  # brokers may have created it, for a producer that asked for it
        topic_id = self._id(output)
        self._now = topic_id if topic_id != was else ""  # one broker may still know the one before, or none at all
        return bool(self._now)

    def _id(self, topic: str) -> str:
        with suppress(SourceError):
            described = self.cluster.admin().describe_topics([topic])[topic]
            return str(described.topic_id) if described is not None else ""
        return ""

    def violation(self) -> str:
        """Under the weaker guarantees one batch may be written, outside of any transaction, before the run stops."""
        if self.scenario.cell.guarantee is not Guarantee.EXACTLY_ONCE:
            return ""
        committed = len(read_places(self.cluster.bootstrap, self.scenario.oracle.table))
        return f"{committed:,} records were committed into the recreated output" if committed else ""


class LogTruncatedFault(Fault):
    """An unclean leader election: the only replica left is one that missed records which were claimed."""

    def make_topic(self, partitions: int) -> None:
        self._stale, self._leader = self.rng.sample([1, 2, 3], 2)
        config = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
        replicas = [[self._leader, self._stale]] * partitions
        self.cluster.admin().create_topic(self.scenario.topic, partitions, replicas, config)
        if self.scenario.oracle.output_topic:
            # The pipeline would give its output two replicas, as the source has, and could not write with one away.
            self.cluster.make_topic(self.scenario.oracle.table, partitions)

    def inject(self) -> None:
        scenario, cluster = self.scenario, self.cluster
        cluster.broker(self._stale).kill()
        scenario.wait_until(lambda: self._all(lambda partition: partition.in_sync == (self._leader,)), 40)
        before = cluster.ends(scenario.topic)
        moved = sum(before.values()) + 200
        scenario.wait_until(lambda: scenario.claimed() > moved, WAIT_S)
        scenario.workload.stop()
        scenario.wait_until(scenario.caught_up, 60)
        scenario.driver.stop()
        cluster.broker(self._leader).kill()
        cluster.local.start(f"broker-{self._stale}")
        scenario.wait_until(lambda: self._all(lambda partition: partition.leader == self._stale), 60)
        cluster.local.up()
        positions, ends = scenario.oracle.positions(), cluster.ends(scenario.topic)
        for n, end in ends.items():
            if end < positions.get(n, 0):
                self.proof = f"partition {n} ends at {end}, and the position is {positions[n]}"
                break

    def _all(self, met: Callable[[Partition], bool]) -> bool:
        """Whether every partition is as required; False while no broker answers."""
        with suppress(SourceError):
            return all(map(met, self.cluster.partitions(self.scenario.topic)))
        return False


class PartitionsAdded(Fault):
    def inject(self) -> None:
        workload, topic = self.scenario.workload, self.scenario.topic
        self._new = workload.partitions
        self.cluster.admin().create_partitions(topic, self._new + 1)
        self.scenario.wait_until(lambda: len(self.cluster.partitions(topic)) > self._new, 30)
        self.scenario.sleep(2)  # until the producer has asked for metadata again
        workload.partitions = self._new + 1

    def in_new_partition(self) -> int:
        return sum(1 for sent in self.scenario.workload.sent() if sent.partition == self._new and sent.offset >= 0)

    def fired(self) -> str:
        records = self.in_new_partition()
        return f"{records} records are in the new partition {self._new}" if records else ""


class PartitionAddedBetweenRuns(PartitionsAdded):
    """Under ``start = "latest"`` that partition's records are not of the time before the pipeline, and must come."""

    declares: ClassVar = {"source": {"start": "latest"}}

    def before_load(self) -> None:
        driver = self.scenario.start("--once")
        code = driver.wait(WAIT_S)
        self.scenario.require(code == 0, f"the run on the empty topic ended with {code}: {driver.last_error()}")

    def inject(self) -> None:
        self.scenario.driver.stop()
        super().inject()
        self.scenario.wait_until(lambda: self.in_new_partition() > 50, 30)
        self._before_start = self.in_new_partition()
        self.scenario.start()

    def fired(self) -> str:
        records = self._before_start
        return f"{records} records were in the new partition {self._new} before the next run began" if records else ""


class RefusedStart(Fault):
    """The same pipeline with one more topic, whose declared start is outside its log."""

    _went_on = False

    def inject(self) -> None:
        scenario, second_topic = self.scenario, f"{self.scenario.topic}-more"
        self.cluster.make_topic(second_topic, 1)  # it exists already, if the fault comes twice
        text = scenario.file.read_text(encoding="utf-8")
        topics = json.dumps([scenario.topic, second_topic])
        start = f'"topics" = {topics}, "start" = {{"{second_topic}" = {{"0" = 1000000}}}}'
        file = scenario.folder / "refused.toml"
        file.write_text(text.replace(f'"topics" = ["{scenario.topic}"]', start))
        self._driver = scenario.driver
        refused = scenario.launch(["run", str(file)], "refused")
        try:
            if code := refused.wait(WAIT_S):
                self.proof = f"a second start was refused with exit code {code} ({refused.last_error()})"
        finally:
            refused.end()

    def hold(self) -> None:
        before = self.scenario.claimed()
        self._went_on = self.scenario.wait_for_claims(before) and self._driver.alive
        super().hold()

    def close(self) -> None:
        with suppress(SourceError):
            self.cluster.drop_topic(f"{self.scenario.topic}-more")

    def violation(self) -> str:
        code = self._driver.code
        return "" if self._went_on else f"the healthy run ended with exit code {code} after a refused start"


class UpstreamAborts(Fault):
    transactions = True

    def inject(self) -> None:
        """The workload does it."""

    def fired(self) -> str:
        aborted = self.scenario.workload.aborted
        return f"{aborted} transactions were aborted" if aborted else ""
