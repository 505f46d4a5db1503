"""The page about runs: every picture is in it, nothing is fetched, and what was not measured is named."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from pages import Page
from run_logs import MIB, SWAP, header, old_step, step, write_log

from memo.artifacts.run_log import RunHeader, RunLog
from memo.errors import ArtifactError
from memo.report.run_drawing import (
    Picture,
    copy_rows,
    draw_copies,
    draw_loss,
    draw_memory,
    draw_plan,
    memory_rows,
    smoothed,
)
from memo.report.run_page import draw_runs, run_page, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def run(tmp_path: Path, name: str = "a", lines: list[object] | None = None, head: RunHeader | None = None) -> RunLog:
    written = [step(i) for i in range(1, 9)] if lines is None else lines
    return RunLog.load(write_log(tmp_path / name / "log.jsonl", written, head))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The report of one run with a plan."""
    folder = tmp_path_factory.mktemp("run")
    return write_report({"a": run(folder, head=header())}, folder / "report")


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but not painted, which takes most of the time."""
    monkeypatch.setattr("memo.report.run_drawing.encoded", lambda figure: b"a picture")


def test_a_page_needs_nothing_beside_itself(written: list[Path]) -> None:
    page = Page(written[0].read_text())
    assert page.open == []  # every tag is closed, in order
    images = page.images()
    assert [png_size(image)[0] > 300 for image in images] == [True] * 5
    assert images == [path.read_bytes() for path in written[1:]]
    assert [path.name for path in written[1:]] == ["loss.png", "speed.png", "memory.png", "copies.png", "plan.png"]
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "base")
        for name in ("src", "href", "style", "onload"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "url(" not in written[0].read_text() and "@import" not in written[0].read_text()


def test_the_figures_of_the_log_stand_in_the_page(tmp_path: Path) -> None:
    log = run(tmp_path, lines=[step(1), step(2, lm_loss=1.25), step(3, tgs=5000.0), step(4)], head=header())
    rows = Page(run_page({"a": log}, [])).rows()
    for expected in (
        ["iterations", "1 to 4"],
        ["last loss", "5.6000"],
        ["lowest loss", "1.2500 (iteration 2)"],
        ["TGS, best", "5,000.0"],
        ["MFU, median", "40.00 %"],
        ["device memory, peak", "200.00 MiB"],
        ["device", "NVIDIA H100"],
        ["parameters", "123.46M"],
        ["layout", "tp 2 x cp 4 x pp 1 x dp 1, 3 microbatches"],
        ["transient", "45.00 MiB", "50.00 MiB"],
        ["copies", "0.4", "0.4"],
        ["compute waits for copies", "0.05", "0.1"],
        ["copies hidden", "88%", "75%"],
        ["lr", "0.0003"],
        ["seq_length", "65536"],
    ):
        assert any(row[: len(expected)] == expected for row in rows), expected
    assert not any(row[0] == "global_batch_size" for row in rows)  # None: the default
    assert not any(row[0] == "validation loss" for row in rows)  # nothing was evaluated


def test_the_losses_of_held_out_data_stand_in_the_page(tmp_path: Path) -> None:
    told = [{"iteration": i, "evaluation": {"loss": loss}} for i, loss in ((0, 5.0), (1, 4.0), (2, 3.5))]
    twice = run(tmp_path, "twice", lines=[told[0], step(1), told[1], step(2), told[2]])
    once = run(tmp_path, "once", lines=[step(1), told[1]])
    rows = Page(run_page({"twice": twice, "once": once}, [])).rows()
    assert ["validation loss", "5.0000 (iteration 0) to 3.5000 (iteration 2)", "4.0000 (iteration 1)"] in rows


@pytest.mark.usefixtures("unpainted")
def test_a_page_of_a_cpu_shows_no_mfu_and_no_bar_that_cannot_be_as_foreseen(tmp_path: Path) -> None:
    on_cpu = header(config={"hardware": {"device": "cpu"}})
    log = run(tmp_path, lines=[step(1, mfu_percent=None), step(2, mfu_percent=None)], head=on_cpu)
    text = run_page({"a": log}, draw_runs({"a": log}))
    rows = Page(text).rows()
    assert "MFU" not in text and "utilisation" not in text and ["TGS, best", "1,002.0"] in [row[:2] for row in rows]
    assert (
        "transient" not in {row[0] for row in memory_rows(log)} and ["transient", "45.00 MiB", "50.00 MiB"] not in rows
    )
    assert "Left out is the transient part: on a CPU" in draw_plan(log).caption
    on_gpu = run(tmp_path, "gpu", head=header())
    assert "transient" in {row[0] for row in memory_rows(on_gpu)} and "Left out" not in draw_plan(on_gpu).caption
    both = Page(run_page({"cpu": log, "gpu": on_gpu}, draw_runs({"cpu": log, "gpu": on_gpu}))).rows()
    assert ["MFU, median", "-", "40.00 %"] in both


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    log = run(tmp_path, head=header(device="<script>alert(1)</script> & co"))
    page = Page(run_page({"<b>run</b>": log}, [Picture("loss", "<b>Loss", "<i>", b""), Picture("x", "y", "<u>", None)]))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "b", "i", "u"})
    assert "<script>alert(1)</script> & co" in page.texts


@pytest.mark.parametrize(
    ("lines", "head", "missing"),
    [
        ([old_step(1)], None, {"memory": "train again", "copies": "--offload-alpha", "plan": "log.run.json"}),
        ([old_step(1)], header(), {"memory": "train again", "copies": "--log-interval", "plan": "train again"}),
        ([step(1, hidden_share=None)], header(swap=None), {"copies": "--offload-alpha auto or a number"}),
        (
            [step(1, hidden_share=None)],
            header(swap=SWAP.__class__(**{**SWAP.__dict__, "moves": False})),
            {"copies": "a number in --offload-alpha forces it"},
        ),
        ([step(1)], header(), {}),
    ],
    ids=["old, no header", "old", "plain", "moves nothing", "all"],
)
@pytest.mark.usefixtures("unpainted")
def test_what_is_not_in_the_log_is_not_drawn_and_says_why(
    tmp_path: Path, lines: list[object], head: RunHeader | None, missing: dict[str, str]
) -> None:
    log = run(tmp_path, lines=lines, head=head)
    pictures = [draw(log) for draw in (draw_memory, draw_copies, draw_plan)]
    assert {p.name: p.png is None for p in pictures} == {name: name in missing for name in ("memory", "copies", "plan")}
    page = Page(run_page({"a": log}, pictures))
    assert page.images() == [b"a picture"] * (3 - len(missing))
    assert ("Not drawn" in page.texts) == bool(missing)
    for name, words in missing.items():
        (picture,) = (p for p in pictures if p.name == name)
        assert words in picture.caption
        assert any(picture.caption in text for text in page.texts)


@pytest.mark.usefixtures("unpainted")
def test_several_runs_share_curves_and_keep_their_own_memory(tmp_path: Path) -> None:
    one, two = run(tmp_path, "one", head=header()), run(tmp_path, "two", lines=[step(1), step(2, lm_loss=3.0)])
    names = [path.name for path in write_report({"one": one, "two": two}, tmp_path / "both")[1:]]
    assert names == ["loss.png", "speed.png", "memory1.png", "copies1.png", "plan1.png", "memory2.png", "copies2.png"]
    rows = Page(run_page({"one": one, "two": two}, [])).rows()
    assert ["last loss", "5.2000", "3.0000"] in rows


def test_pictures_change_with_what_they_show_and_with_nothing_else(tmp_path: Path) -> None:
    plain = run(tmp_path, lines=[step(1), step(2)])
    before = draw_memory(plain).png
    assert before == draw_memory(plain).png
    for field in ("weights_bytes", "transient_peak_bytes", "host_records_bytes"):
        changed = run(tmp_path, field, lines=[step(1), step(2, **{field: 90 * MIB})])
        assert draw_memory(changed).png != before, field
    assert draw_loss({"one": plain, "two": run(tmp_path, "b", lines=[step(1)])}).png != draw_loss({"one": plain}).png
    planned = [
        draw_plan(run(tmp_path, f"p{at}", head=header(**swap))).png for at, swap in enumerate(({}, {"swap": None}))
    ]
    assert planned[0] != planned[1]


def test_pictures_of_a_single_iteration_and_of_loss_that_is_no_number(tmp_path: Path) -> None:
    log = run(tmp_path, lines=[step(1, lm_loss=float("nan"), grad_norm=float("inf"))], head=header())
    assert all(picture.png is not None for picture in draw_runs({"a": log}))
    assert "nan (iteration 1)" in run_page({"a": log}, [])


@pytest.mark.usefixtures("unpainted")
def test_rows_of_plan_against_measured(tmp_path: Path) -> None:
    log = run(tmp_path, lines=[step(1, copies_s=9.0), step(2), step(3)], head=header())
    assert {row[0]: row[1:] for row in memory_rows(log)}["host records"] == (40 * MIB, 40 * MIB)
    assert copy_rows(log) == [
        ("layers compute", 0.7, 0.8),
        ("copies", 0.4, 0.4),
        ("compute waits for copies", 0.05, 0.1),
    ]
    assert draw_copies(log).caption.startswith("Timed every 1 iterations")


def test_smoothing_leaves_no_trace_of_an_outlier() -> None:
    values = [1.0] * 200
    values[100] = 50.0
    assert smoothed(values) == [1.0] * 200
    assert smoothed([float(i) for i in range(300)])[150] == 150.0


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("memo.report.run_page.draw_runs", lambda runs: [])
    with pytest.raises(ArtifactError, match=r"could not be written .*: check the path"):
        write_report({"a": run(tmp_path)}, tmp_path / "file" / "report")


def browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason=f"no browser here: looked for {', '.join(BROWSERS)}")
def test_a_real_browser_shows_every_picture_and_has_nothing_to_complain_about(
    written: list[Path], tmp_path: Path
) -> None:
    """A script that only this test adds writes the sizes of the pictures into the page, which is then dumped."""
    page, probe = tmp_path / "index.html", "document.title = [...document.images].map(x => x.naturalWidth).join(' ')"
    page.write_text(written[0].read_text().replace("</body>", f"<script>{probe}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}/u"]
    command = [str(browser()), *flags, "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    widths = done.stdout.partition("<title>")[2].partition("</title>")[0].split()
    assert len(widths) == 5 and all(int(width) > 300 for width in widths), done.stdout[:500]
    assert "CONSOLE" not in done.stderr
