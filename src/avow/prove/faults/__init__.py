"""The faults: each does its harm, heals it, and can say how it knows that it happened.

A fault is a context manager: entering does it, leaving heals it. ``fired()`` gives the proof in words, or nothing if
there is none; then the cell is unknown, for a fault that did not happen proves nothing. Whatever a fault has to choose
it chooses from its seed.

Owns: how harm is done. Must not know: guarantees' verdicts or how the outcome is read. Neighbours: ``cells`` (the table
of faults by name), ``scene`` (what is hurt).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from avow.prove.faults.base import CannotRun, Fault
from avow.prove.faults.brokers import AllBrokersKilled, BrokerPaused, ControllerKilled, CoordinatorKilled, LeaderKilled
from avow.prove.faults.canaries import CanaryDoubles, CanaryDrops, CanarySwapped
from avow.prove.faults.database import (
    BehindAPooler,
    CommitReplyLost,
    FailoverLostCommits,
    PostgresCut,
    PostgresImmediate,
    PostgresKilled,
)
from avow.prove.faults.disks import DiskFullBroker, DiskFullDatabase, DiskFullLake
from avow.prove.faults.drivers import (
    GroupRebalance,
    JvmKilled,
    KilledAfterClaim,
    KilledAfterWrite,
    KilledAtRandom,
    KilledBeforeCommit,
    KilledInMidWrite,
    ThreeDrivers,
    TwoDrivers,
    WorkerKilled,
    Zombie,
)
from avow.prove.faults.lakes import LakeCommitUnknown
from avow.prove.faults.network import BrokerCutOff, BrokersCutApart, BrokersOneWay, BrokersSlow, CutFromBrokers
from avow.prove.faults.records import DeadLetterStop, PoisonRecords, RedriveAfterCrash, RedrivesBesideARun
from avow.prove.faults.sparks import ExecutorKilled, SparkMasterKilled, SparkWorkerKilled
from avow.prove.faults.topics import (
    LogTruncated,
    OutputRecreatedLive,
    PartitionAddedBetweenRuns,
    PartitionsAdded,
    RefusedStart,
    Retention,
    TopicRecreated,
    TopicRecreatedLive,
    UpstreamAborts,
)
from avow.prove.faults.transactions import ProduceReplyLost, SinkCoordinatorKilled, TransactionTimesOut
from avow.prove.scene import Scene

__all__ = ["BUILT", "CannotRun", "Fault"]

BUILT: Mapping[str, Callable[[Scene, int, float], Fault]] = MappingProxyType(
    {
        "killed-after-claim": KilledAfterClaim,
        "killed-after-write": KilledAfterWrite,
        "killed-in-mid-write": KilledInMidWrite,
        "killed-before-commit": KilledBeforeCommit,
        "killed-at-random": KilledAtRandom,
        "zombie": Zombie,
        "two-drivers": TwoDrivers,
        "three-drivers": ThreeDrivers,
        "worker-killed": WorkerKilled,
        "jvm-killed": JvmKilled,
        "executor-killed": ExecutorKilled,
        "spark-worker-killed": SparkWorkerKilled,
        "spark-master-killed": SparkMasterKilled,
        "leader-killed": LeaderKilled,
        "controller-killed": ControllerKilled,
        "coordinator-killed": CoordinatorKilled,
        "sink-coordinator-killed": SinkCoordinatorKilled,
        "broker-paused": BrokerPaused,
        "all-brokers-killed": AllBrokersKilled,
        "broker-cut-off": BrokerCutOff,
        "brokers-cut-apart": BrokersCutApart,
        "cut-from-brokers": CutFromBrokers,
        "brokers-one-way": BrokersOneWay,
        "brokers-slow": BrokersSlow,
        "produce-reply-lost": ProduceReplyLost,
        "transaction-times-out": TransactionTimesOut,
        "postgres-killed": PostgresKilled,
        "postgres-immediate": PostgresImmediate,
        "postgres-cut": PostgresCut,
        "commit-reply-lost": CommitReplyLost,
        "lake-commit-unknown": LakeCommitUnknown,
        "disk-full-database": DiskFullDatabase,
        "disk-full-lake": DiskFullLake,
        "disk-full-broker": DiskFullBroker,
        "retention": Retention,
        "topic-recreated": TopicRecreated,
        "log-truncated": LogTruncated,
        "partitions-added": PartitionsAdded,
        "upstream-aborts": UpstreamAborts,
        "group-rebalance": GroupRebalance,
        "topic-recreated-live": TopicRecreatedLive,
        "partition-added-between-runs": PartitionAddedBetweenRuns,
        "redrives-beside-a-run": RedrivesBesideARun,
        "redrive-after-crash": RedriveAfterCrash,
        "poison-records": PoisonRecords,
        "dead-letter-stop": DeadLetterStop,
        "failover-lost-commits": FailoverLostCommits,
        "refused-start": RefusedStart,
        "output-recreated-live": OutputRecreatedLive,
        "behind-a-pooler": BehindAPooler,
        "canary-swapped": CanarySwapped,
        "canary-drops": CanaryDrops,
        "canary-doubles": CanaryDoubles,
    }
)
