"""History and report: added to and never rewritten, resumed after a crash, shown as it is told."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from avow.prove import history, report
from avow.prove.history import History

HELD, LOST = "zombie/exactly-once/postgres/append/spark", "killed-after-claim/at-most-once/postgres/append/spark"


def record_verdict(folder: Path) -> None:
    log = History(folder)
    log.add("proof", seed=7, versions={"kafka": "4"})
    for cell, check in ((HELD, {}), (LOST, {"lost": 1234})):
        log.add("cell", cell, schedule=[], replay="--fault x --seed 7")
        log.add("rows", cell, rows=0)
        log.add("fault", cell, fault="zombie")
        log.add("heal", cell, fault="zombie")
        log.add("rows", cell, rows=500)
        log.add("note", cell, text="<script>alert(1)</script> | a\nb")
        log.add("verdict", cell, verdict="held", why="100 <records>", check=check, fired=["pid 1 <died>"])
    log.close()


def test_what_was_added_is_read_back_and_adding_goes_on(tmp_path: Path) -> None:
    record_verdict(tmp_path)
    before = history.FILE, (tmp_path / history.FILE).read_bytes()
    log = History(tmp_path)
    log.add("verdict", HELD, verdict="unknown")
    log.close()
    assert (tmp_path / history.FILE).read_bytes().startswith(before[1])
    assert {name: line["verdict"] for name, line in history.verdicts(tmp_path).items()} == {
        HELD: "unknown",
        LOST: "held",
    }


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    record_verdict(tmp_path)
    path = tmp_path / history.FILE
    path.write_bytes(path.read_bytes()[:-30])
    assert LOST not in history.verdicts(tmp_path)
    log = History(tmp_path)
    log.add("verdict", LOST, verdict="held")
    log.close()
    assert history.verdicts(tmp_path).keys() == {HELD, LOST}


def test_nothing_yet(tmp_path: Path) -> None:
    assert history.verdicts(tmp_path) == {}
    assert report.load(tmp_path) == ({}, [])


def test_the_report_stands_alone_and_shows_everything(tmp_path: Path) -> None:
    record_verdict(tmp_path)
    page, text = (path.read_text(encoding="utf-8") for path in report.write(tmp_path))
    assert "<b>2</b> held" in page
    assert all(f'href="#{name.replace("/", "-")}"' in page for name in (HELD, LOST))
    assert "1,234 lost" in page
    assert "seed 7" in page
    assert page.count("<svg") == 2
    assert "avow prove --fault x --seed 7" in page
    assert "<script" not in page, "what a log says is text"
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert "| 1 | kill -9 right after the claim | held: 1,234 lost |  |  |" in text
    assert "<died>" not in text


def test_the_timeline_is_well_formed_and_within_its_box(tmp_path: Path) -> None:
    record_verdict(tmp_path)
    _, cells = report.load(tmp_path)
    drawn = ElementTree.fromstring(report.timeline(cells[0]))
    (line,) = drawn.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 2
    assert all(0 <= x <= report.WIDTH and 0 <= y <= report.HEIGHT for x, y in points)
    assert len(list(drawn.iter("rect"))) == 1


def test_a_cell_played_again_shows_the_last_time(tmp_path: Path) -> None:
    record_verdict(tmp_path)
    record_verdict(tmp_path)
    _, cells = report.load(tmp_path)
    assert [(cell.name, len(cell.rows)) for cell in cells] == [(HELD, 2), (LOST, 2)]
