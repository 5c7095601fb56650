"""An audit or a redrive in a process of its own, which reports progress as JSON lines on its standard output.

``jobs`` runs it: ``python -m avow.dashboard.worker audit FILE FOLDER``, or ``redrive FILE SELECTION``. It is a process
of its own because both may start Spark: its JVM ends with it, and so does what it holds of memory.

Owns: the lines. Its neighbour is ``jobs``, which reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from avow.errors import AvowError, first_line
from avow.pipeline import Pipeline


def emit(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def audit(file: Path, folder: Path) -> None:
    emit(progress="reading the pipeline file")
    pipeline = Pipeline.load(file)
    from avow.audit.archive import keep

    report = pipeline.audit(on_progress=lambda text: emit(progress=text))
    keep(report, folder)
    emit(done=report.sentence, verdict=str(report.verdict), advice=report.advice)


def redrive(file: Path, which: dict[str, Any]) -> None:
    emit(progress="reading the pipeline file")
    done = (
        Pipeline.load(file)
        .dead_letters()
        .redrive(
            on_progress=lambda so_far: emit(progress=f"{so_far.written:,} written, {so_far.still_dead:,} still bad"),
            **which,
        )
    )
    emit(done=f"{done.written:,} written, {done.skipped:,} skipped, {done.still_dead:,} still dead letters")


def main() -> None:
    kind, file, rest = sys.argv[1:4]
    try:
        if kind == "audit":
            audit(Path(file), Path(rest))
        else:
            redrive(Path(file), json.loads(rest))
    except AvowError as error:
        emit(problem=str(error), advice=error.advice)
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 - shown on the job's page
        emit(problem=f"{type(error).__name__}: {first_line(error)}", advice="")
        sys.exit(1)


if __name__ == "__main__":
    main()
