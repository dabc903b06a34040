"""The report of a run: one HTML file with every number of the run, that loads nothing, however the run ended."""

from __future__ import annotations

import json
import os
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

from hf_util import write_hf_job
from jumar import cli, profile
from jumar.train import JobError, pace, report, report_plots
from jumar.train.durable import RunLock
from train_util import quickly, train_job, write_job

HOSTILE = '<script>alert("1")</script> & \'ü\' </title>'
SHORT = ["checkpoint.export_hf=false", "metrics.plot_file="]

_EMPTY = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page as a browser would take it apart. Fails where elements do not nest."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.links, self.values = [], [], [], []
        self.text, self.data = {}, ""
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        named = dict(attributes)
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"):
            if name in named and not (named[name] or "").startswith("#"):
                self.links.append((tag, name, named[name]))
        if tag == "data":
            self.values.append(named["value"])
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        self.text[inside] = self.text.get(inside, "") + data + "\n"

    @property
    def words(self) -> str:
        return "\n".join(t for tag, t in self.text.items() if tag not in ("style", "script"))


def check(file: Path) -> Page:
    """The page, after the checks that hold for every one."""
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.links == [], page.links
    assert text.count("http") == text.count("http-equiv") == 1
    assert "@import" not in text and "url(" not in text.replace("url(#", "")
    assert page.tags.count("script") == 1 and "link" not in page.tags and "img" not in page.tags
    assert not list(file.parent.glob(f".{file.name}*"))
    return page


_quick = pytest.fixture(scope="module", autouse=True)(quickly)


def _run(job: Path, *overrides: str) -> dict:
    return train_job(job, *SHORT, *overrides)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps, evaluated, profiled, with a checkpoint; described in characters that HTML gives a meaning."""
    folder = tmp_path_factory.mktemp("run")
    job = write_job(folder)
    job.write_text(job.read_text() + f"# {HOSTILE}\n")
    result = _run(
        job, "training.steps=4", f"job.description={HOSTILE}", "validation.enable=true", "validation.dataset_path=text",
        "validation.freq=2", "validation.steps=1", "profiling.enable_profiling=true", "profiling.profile_freq=3",
        "profiling.profiler_warmup=1", "checkpoint.enable=true", "checkpoint.interval=2", "checkpoint.async_mode=disabled",
    )  # fmt: skip
    return folder / "out", result


def test_every_number_of_the_metrics_is_there(run):
    folder, result = run
    page = check(folder / "report.html")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4 and records[0]["memory_bytes"] > 1e6
    assert all(r["peak_memory_bytes"] >= r["memory_bytes"] for r in records)
    numbers = [repr(v) for r in records for v in r.values() if isinstance(v, int | float)]
    assert len(numbers) > 40 and set(numbers) <= set(page.values)
    assert json.loads(page.text["script"]) == records
    assert result["report_file"] == str(folder / "report.html")


def test_what_a_page_shows(run):
    folder, result = run
    page = check(folder / "report.html")
    words = page.words
    assert page.tags.count("svg") == 5
    assert "finished after step 4" in words and "qwen3 tiny" in words
    for row in result["operators"]:
        assert row["converter"] in words and str(row["calls"]) in page.values
    assert "jumar::npu_linear" in words and "GFLOP/s" in words  # the profile
    assert "step-2" in words and "step-4" in words and "whole" in words
    assert torch.__version__ in words and "SIMD" not in page.text.get("script", "")
    assert "training.steps = 4" in words  # an override
    assert "mixed_precision_param" in words  # the job file
    assert "validation loss" in words


def test_hostile_text_stays_text(run):
    folder, _ = run
    page = check(folder / "report.html")
    assert HOSTILE in page.text["p"] and f"# {HOSTILE}" in page.text["pre"]
    assert "alert" not in page.text["script"]


def test_plots_have_their_lines_and_labels(run):
    text = (run[0] / "report.html").read_text()
    for label in ("loss over the steps: train, validation", "gradient norm", "learning rate", "tokens per second", "memory, GiB"):
        assert f'aria-label="{label}' in text
    assert "<metadata" not in text and "xmlns" not in text and "<!DOCTYPE svg" not in text


def test_again_from_the_files(run, tmp_path, capsys):
    folder, _ = run
    before = (folder / "report.html").read_text()
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert not stop.value.code and capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == before
    (tmp_path / "empty").mkdir()
    for place, message in ((tmp_path / "nix", "no such folder"), (tmp_path / "empty", "no folder of a run")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["report", str(place)])
        captured = capsys.readouterr()
        assert stop.value.code == 2 and captured.err.startswith(f"jumar report: {place}: {message}")


def test_other_engine(tmp_path):
    """The same files from transformers' Trainer."""
    folder = tmp_path / "out"
    result = _run(
        write_hf_job(tmp_path), "training.steps=4", "profiling.enable_profiling=true", "profiling.profile_freq=3",
        "profiling.profiler_warmup=1", "metrics.report_file=report.html",
    )  # fmt: skip
    assert [p.name for p in (folder / "profiling" / "traces").iterdir()] == ["iteration_3"]
    rows = {row.operator: row for row in profile.table(profile.read(folder)).rows}
    linear = next(row for row in result["operators"] if row["operator"] == "npu_linear")
    assert rows["jumar::npu_linear"].calls == linear["calls"] / 4 and rows["jumar::npu_linear"].percent > 0
    page = check(folder / "report.html")
    assert "finished after step 4" in page.words and "jumar::linear_dgrad" in page.words
    numbers = [repr(v) for r in result["records"] for v in r.values() if isinstance(v, int | float)]
    assert set(numbers) <= set(page.values) and result["records"][0]["memory_bytes"] > 1e6
    assert json.loads((folder / "run.json").read_text())["engine"] == "transformers"


def test_stopped_and_resumed(run, tmp_path):
    """A signal ends the first session; the second goes on from its checkpoint."""
    job = write_job(tmp_path)
    saved = ("training.steps=3", "checkpoint.enable=true", "checkpoint.async_mode=disabled")
    begun = []

    def at_the_second_step():
        begun.append(1)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    pace.set_hook(at_the_second_step)
    try:
        _run(job, *saved)
    finally:
        pace.set_hook(None)
    file = tmp_path / "out" / "report.html"
    assert "stopped by SIGTERM after step 2" in check(file).words
    _run(job, *saved)
    page = check(file)
    assert "finished after step 3" in page.words and "step-2" in page.words
    sessions = json.loads((tmp_path / "out" / "run.json").read_text())["sessions"]
    assert [s["state"] for s in sessions] == ["stopped", "finished"] and sessions[1]["resumed_from"]
    assert len(json.loads(page.text["script"])) == 3


def test_failed_run_says_how(tmp_path):
    job = write_job(tmp_path)

    def fail():
        raise ZeroDivisionError("a <b>bad</b> step")

    pace.set_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            _run(job, "training.steps=2")
    finally:
        pace.set_hook(None)
    page = check(tmp_path / "out" / "report.html")
    assert "failed with an error: ZeroDivisionError: a <b>bad</b> step" in page.words
    assert "Traceback" in page.text["pre"] and "no step was recorded" in page.words
    assert "npu_linear" in page.words  # the places that were planned


def test_report_can_be_switched_off(tmp_path):
    result = _run(write_job(tmp_path), "training.steps=1", "metrics.report_file=", "metrics.jsonl_file=")
    assert result["report_file"] is None and not (tmp_path / "out" / "report.html").exists()
    page = check(report.write(tmp_path / "out"))  # the records are in run.json
    assert repr(result["losses"][0]) in page.values


def _folder(path: Path, records: list[dict], **data) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if data:
        (path / "run.json").write_text(json.dumps({"format": report.FORMAT, **data}))
    return path


def _steps(count: int) -> list[dict]:
    return [{"step": i, "loss": 5 - i / count, "tokens_per_second": 100.0 + i % 7, "lr": 1e-3} for i in range(1, count + 1)]


def test_killed_running_and_metrics_alone(tmp_path):
    sessions = [{"started": "then", "state": "running", "process": "7 on host"}]
    folder = _folder(tmp_path / "a", _steps(3), sessions=sessions)
    assert "killed after step 3" in check(report.write(folder)).words
    with RunLock(folder):
        assert "running, so far after step 3" in check(report.write(folder)).words
    alone = check(report.write(_folder(tmp_path / "b", _steps(3))))
    assert "run.json is missing" in alone.words
    (tmp_path / "b" / "run.json").write_text('{"format": 1, ')
    assert "run.json is damaged" in check(report.write(tmp_path / "b")).words


def test_long_runs_are_thinned_but_whole_as_data(tmp_path):
    records = _steps(5000)
    records[41]["loss"] = float("nan")
    folder = _folder(tmp_path / "a", records)
    page = check(report.write(folder))
    data = json.loads(page.text["script"])
    assert len(data) == 5000 and data[41]["loss"] == "NaN" and data[42] == records[42]
    assert page.tags.count("tr") < 1100 and "every 5th of 5000 records" in page.words
    assert "the loss is NaN in 1 step(s), first in step 42" in page.words
    assert (folder / "report.html").stat().st_size < 1.5e6


def test_thinning_keeps_the_extremes():
    points = [(i, 0.0) for i in range(10000)]
    points[1234], points[8765] = (1234, 9.0), (8765, -9.0)
    thin = report_plots.thin(points, 100)
    assert len(thin) <= 120 and {points[0], points[1234], points[8765], points[-1]} <= set(thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_beside_eager(tmp_path):
    folder = _folder(tmp_path / "a", _steps(4))
    eager = [r | {"loss": r["loss"] + 1e-3, "tokens_per_second": 10.0} for r in _steps(4)[:2]]
    _folder(folder / "eager", eager)
    page = check(report.write(folder))
    assert "-1.00e-03" in page.words and "10.30x" in page.text["b"]


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path, caplog):
    """The run's own error, or result, comes through; the old report stays whole."""
    job = write_job(tmp_path)
    (tmp_path / "out" / "report.html").mkdir(parents=True)  # in the way
    result = _run(job, "training.steps=1")
    assert len(result["losses"]) == 1 and "the report of the run is not written" in caplog.text


def test_write_is_atomic(run, tmp_path, monkeypatch):
    folder = _folder(tmp_path / "a", _steps(3))
    file = report.write(folder)
    before = file.read_text()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        report.write(folder)
    monkeypatch.undo()
    assert file.read_text() == before and [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_not_a_run(tmp_path):
    with pytest.raises(JobError, match="no such folder"):
        report.write(tmp_path / "nix")
