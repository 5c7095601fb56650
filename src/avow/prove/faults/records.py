"""Bad records, poison records, and redrives of dead letters under faults.

Bad records have a field that the schema does not declare. A redrive is run with a file that ignores such fields, as a
user would who has changed the schema.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any, ClassVar

from avow.prove import failpoints
from avow.prove.check import SCHEMA, checksum, value
from avow.prove.driver_process import DriverProcess
from avow.prove.faults.base import WAIT_S, CannotRun, Fault
from avow.prove.workload_spec import NumberedRecords

ANY_SHARE = {"dead_letters": {"max_share": 1.0}}
REDRIVE_S = 120


class _OwnRecords(Fault):
    """Needs the records that the harness generates itself."""

    def prepare(self) -> None:
        if not isinstance(self.scenario.spec, NumberedRecords):
            raise CannotRun("this fault generates records for the harness's own pipeline, not for a user's file")


def undeclared_field(number: int, key: int) -> dict[str, Any]:
    """A record that ``unknown_fields = "reject"`` refuses and ``"ignore"`` takes."""
    return {"value": json.dumps({**json.loads(value(number, key)), "extra": 1}).encode()}


class _Redriving(_OwnRecords):
    """One record in 25 is bad at first, and good for a redrive."""

    # A lake takes one commit at a time, and a redrive's is long: beside a run that commits twice a second none gets in.
    declares: ClassVar = {**ANY_SHARE, "batch": {"interval": "2s"}}
    dead_least = 20

    def prepare(self) -> None:
        self._redrives: list[DriverProcess] = []
        self._killed = self._done = 0
        super().prepare()

    def message(self, number: int, key: int) -> dict[str, Any]:
        return undeclared_field(number, key) if number % 25 == 7 else {}

    def before_load(self) -> None:
        self._file = self.scenario.folder / "redrive.toml"
        # From here on the audit knows these records as good, wherever they are now.
        audit = self.scenario.folder / "audit.toml"
        for source, target in ((self.scenario.file, self._file), (audit, audit)):
            text = source.read_text(encoding="utf-8")
            target.write_text(text.replace('"format" = "json"', '"format" = "json", "unknown_fields" = "ignore"'))

    def start(self, env: Mapping[str, str] | None = None) -> DriverProcess:
        command = ["dead-letters", "redrive", str(self._file), "--json"]
        self._redrives.append(self.scenario.launch(command, f"redrive-{len(self._redrives) + 1}", env))
        return self._redrives[-1]

    def finish(self, redrive: DriverProcess) -> None:
        if redrive.wait(REDRIVE_S) is None:
            redrive.end()
        with suppress(ValueError, IndexError):
            self._done += json.loads(redrive.log.read_text().splitlines()[-1])["written"]

    def start_paused(self) -> DriverProcess:
        """A redrive, stopped (SIGSTOP) after it wrote everything and before it commits; or ended, if there was no dead
        letter to redrive."""
        folder = Path(self.scenario.folder, f"redrive-failpoint-{len(self._redrives) + 1}").absolute()
        folder.mkdir()
        redrive = self.start({failpoints.VARIABLE: f"redriven:0:stop:{folder}"})
        self.scenario.wait_until(lambda: redrive.paused or not redrive.alive, WAIT_S)
        return redrive

    def kill(self, redrive: DriverProcess, after_s: float) -> None:
        """Where it is stopped; or, with ``after_s`` above 0, that long after SIGCONT: during its commits."""
        if after_s:
            redrive.resume()
            redrive.wait(after_s)
        redrive.kill()
        self._killed += redrive.code == -SIGKILL

    def until_dead(self) -> None:
        scenario = self.scenario
        scenario.wait_until(
            lambda: len(scenario.oracle.dead_letters()) >= self.dead_least or not scenario.driver.alive, WAIT_S
        )

    def close(self) -> None:
        for redrive in self._redrives:
            redrive.end()


class RedrivesBesideARun(_Redriving):
    rounds = 3

    def inject(self) -> None:
        self._beside = self._in_midst = 0
        for number in range(self.rounds):
            self.until_dead()
            self._beside += self.scenario.driver.alive
            first = self.start_paused()
            self._in_midst += first.paused
            second = self.start()
            second.wait(self.rng.uniform(0.5, 3))
            self.kill(first, self.rng.uniform(0.01, 0.5) if number else 0)
            self.finish(second)
        self.finish(self.start())

    def fired(self) -> str:
        if not (self._beside and self._in_midst and self._killed and self._done):
            return ""
        return (
            f"{len(self._redrives)} redrives during a run, two at a time, delivered {self._done} dead letters or more; "
            f"{self._in_midst} were stopped before their commit, and {self._killed} of them died of SIGKILL there or "
            "during it"
        )


class RedriveAfterCrash(_Redriving):
    rounds = 2

    def inject(self) -> None:
        self._crashes = 0
        for _ in range(self.rounds):
            self.until_dead()
            driver = self.scenario.driver
            driver.kill()
            self._crashes += driver.code == -SIGKILL
            self.finish(self.start())
            before = self.scenario.claimed()
            self.scenario.start()
            self.scenario.wait_for_claims(before)

    def fired(self) -> str:
        if not (self._crashes and self._done):
            return ""
        return (
            f"{self._crashes} times a driver died of SIGKILL and a redrive came before the next: {self._done} delivered"
        )


class DeadLetterStop(_OwnRecords):
    """From some moment on every record is bad."""

    _bad_from: int | None = None

    def message(self, number: int, key: int) -> dict[str, Any]:
        bad = self._bad_from is not None and number >= self._bad_from
        return undeclared_field(number, key) if bad else {}

    def inject(self) -> None:
        self.scenario.wait_for_claims(self.scenario.claimed())
        self._bad_from = self.scenario.workload.next
        self.scenario.workload.burst(6_000)
        self.scenario.wait_until(lambda: not self.scenario.driver.alive, WAIT_S)

    def fired(self) -> str:
        ended = not self.scenario.driver.alive or len(self.scenario.drivers) > 1
        return f"every record from number {self._bad_from} on is bad" if ended and self._bad_from is not None else ""


def _document(number: int, key: int, body: str) -> bytes:
    document = {"n": number, "k": key, "crc": checksum(number, key, body), "body": body}
    return json.dumps(document).encode()


def _with_amount(number: int, key: int, amount: str) -> bytes:
    return value(number, key).replace(b"{", f'{{"amount":{amount},'.encode(), 1)


def _with_crc(number: int, key: int, crc: str) -> bytes:
    return f'{{"n":{number},"k":{key},"crc":{crc},"body":"poison {number}"}}'.encode()


_CONTROLS = "".join(map(chr, range(1, 32))) + "\x7f\u2028\u202e"
POISON: tuple[Callable[[int, int], dict[str, Any]], ...] = (
    lambda number, key: {"value": _with_amount(number, key, "1e-10000000")},  # once a segmentation fault of Arrow's
    lambda number, key: {"value": _with_amount(number, key, "1e-41")},  # once taken as 0
    lambda number, key: {"value": _with_amount(number, key, '"1E+10000000"')},
    lambda number, key: {"value": _with_amount(number, key, "0.005")},
    lambda number, key: {"value": _with_amount(number, key, "-0.00")},
    lambda number, key: {"value": _with_crc(number, key, "1e-10000000")},
    lambda number, key: {"value": _with_crc(number, key, "1e10000000")},
    lambda number, key: {"value": _with_crc(number, key, "9" * 1_001)},
    lambda number, key: {"value": _with_crc(number, key, "9223372036854775808")},
    lambda number, key: {"value": _with_crc(number, key, "NaN")},
    lambda number, key: {"value": _document(number, key, f"controls {number} {_CONTROLS}")},
    lambda number, key: {"value": _document(number, key, f"NUL {number} \0")},
    lambda number, key: {"value": _with_crc(number, key, "0").replace(b"poison", b"\\ud800")},
    lambda number, key: {"value": _with_crc(number, key, "0").replace(b"poison", b"\xff\xfe")},
    lambda number, _: {"value": b"[" * 3_000 + str(number).encode()},
    lambda number, key: {"value": value(number, key) + b"\n" + value(number, key)},
    lambda _number, _key: {"value": b"", "timestamp": 1},
    lambda number, key: {"timestamp": 253_402_300_800_000 + number, "value": value(number, key)},  # year 10000
    lambda number, key: {"timestamp": 2**62, "value": value(number, key)},
    lambda number, key: {"timestamp": zlib.crc32(b"%d" % number) * 1_000_000_000, "value": value(number, key)},
    lambda number, key: {"key": b"k" * 100_000, "value": value(number, key)},
    lambda number, key: {"key": b"", "value": value(number, key)},
    lambda _number, _key: {"headers": [("", None), ("", b""), ("\u0000n", b"\xff"), ("x" * 40_000, b"x")]},
    lambda _number, _key: {"headers": [(f"h{n % 3}", b"%d" % n) for n in range(500)]},
    lambda _number, _key: {"raw_headers": [(b"\xff\xfe", b"x"), (b"good", None)]},  # names that are no UTF-8
    lambda _number, _key: {"raw_headers": [(b"good", b"x"), (b"cut \xe2\x82", None), (b"\xed\xa0\x80", b"")]},
)


class PoisonRecords(_OwnRecords):
    """Each must end as the row that it is, or as a dead letter; and the run goes on."""

    declares: ClassVar = {**ANY_SHARE, "decode": {"schema": f"{SCHEMA}, amount decimal(12,2)"}}
    every = 29

    def make_topic(self, partitions: int) -> None:
        # Else the broker refuses timestamps of more than an hour from now.
        config = {"message.timestamp.after.max.ms": str(2**63 - 1)}
        self.cluster.admin().create_topic(self.scenario.topic, partitions, config=config)

    def message(self, number: int, key: int) -> dict[str, Any]:
        return {} if number % self.every else POISON[number // self.every % len(POISON)](number, key)

    def inject(self) -> None:
        """The workload does it. Enough for each kind to come several times."""
        self._driver = self.scenario.driver
        self.scenario.workload.burst(self.every * len(POISON) * 4)

    def violation(self) -> str:
        code = self._driver.code
        return "" if code in (None, 0) else f"the run ended with exit code {code} because of a record"

    def fired(self) -> str:
        poisonous = sum(sent.number % self.every == 0 and sent.offset >= 0 for sent in self.scenario.workload.sent())
        if poisonous <= len(POISON):
            return ""
        return f"{poisonous} of the records in the log are of {len(POISON)} poisonous kinds"
