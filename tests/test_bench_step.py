"""jumar bench --step: contenders of a job, turns, what strays from eager is not timed. No time is asserted."""

from __future__ import annotations

import csv
import json
import math

import pytest

pytest.importorskip("torchtitan")

from jumar import cli
from jumar.bench import command, step, step_report
from jumar.bench.step import Contender, StepError, StepResult
from jumar.train.job import load
from train_util import CONVERTERS, write_job


def _result(**losses: list[float]) -> StepResult:
    forms = [
        Contender("eager", [], [0.4, 0.5, 0.6], losses.get("eager", [2.0, 1.9]), 100.0, 900, 600),
        Contender("jumar", [], [0.2, 0.2, 0.3], losses.get("jumar", [2.0, 1.9]), 100.0, 800, 600),
    ]
    step._compare(forms, "float32")
    return StepResult("job.toml", "a model", "float32", {"threads": 1, "simd": "AVX2", "aten": "AVX2"}, forms)


def test_contenders(tmp_path):
    file = write_job(tmp_path)
    job = load(str(file), ["checkpoint.enable=true"])
    forms = {c.name: c for c in step.contenders(job, ["checkpoint.enable=true"], tmp_path, inductor=True)}
    assert list(forms) == ["eager", "jumar", "inductor"]
    values = {name: load(str(file), form.overrides).values for name, form in forms.items()}
    assert values["jumar"]["model"]["converters"] == CONVERTERS
    assert values["eager"]["model"]["converters"] == values["inductor"]["model"]["converters"] == []
    assert values["inductor"]["compile"]["enable"] and not values["jumar"]["compile"]["enable"]
    for form in values.values():  # the schedule of the job; nothing is saved or evaluated
        assert form["lr_scheduler"]["total_steps"] == 10 and form["training"]["steps"] > 1000
        assert not form["checkpoint"]["enable"] and not form["checkpoint"]["export_hf"]
    assert len({form["job"]["dump_folder"] for form in values.values()}) == 3


def test_accumulated_passes_are_in_the_size_of_a_step(tmp_path):
    file = write_job(tmp_path)
    assert ", 4 x 32 tokens, " in step.describe(load(str(file), ["training.seq_len=32", "training.global_batch_size=4"]))


def test_ratios():
    result = _result()
    assert result.ok and result.ratio("eager") == 2.0 and result.ratio("eager", "median") == 2.5
    assert result.ratio("inductor") is None
    assert result.find("jumar").tokens_per_second == 500.0


@pytest.mark.parametrize("losses", [[2.0, 1.8], [2.1, 1.9], [math.nan, 1.9]])
def test_what_strays_is_not_timed(losses, capsys):
    from rich.console import Console

    result = _result(jumar=losses)
    assert not result.ok and result.find("jumar") is None and result.ratio("eager") is None
    step_report.show(result, Console(width=180))
    out = capsys.readouterr().out
    assert "jumar: wrong: " in out and "not timed" in out
    (line,) = (line for line in out.splitlines() if line.startswith("│ jumar"))
    assert not any(digit in line for digit in "123456789"), line
    (row,) = (r for r in step_report.to_dict(result)["contenders"] if r["name"] == "jumar")
    assert row["seconds"] == [] and "tokens_per_second" not in row


class _Fake:
    """A process that answers at once."""

    def __init__(self, name: str, seconds: float):
        self.contender, self.seconds, self.words = Contender(name, []), seconds, []

    def tell(self, word: str) -> dict:
        self.words.append(word)
        return {"seconds": self.seconds}


def test_turns_rotate_and_slow_contenders_stop(monkeypatch):
    order = []
    monkeypatch.setattr(_Fake, "tell", lambda self, word: order.append(self.contender.name) or {"seconds": self.seconds})
    fast, slow = _Fake("a", 1.0), _Fake("b", 40.0)
    step._turns([fast, slow], 4, lambda text: None)
    assert "".join(order) == "ab" + "ba" + "a" + "a"
    assert fast.contender.seconds == [1.0] * 4 and slow.contender.seconds == [40.0] * 2


def test_a_step(tmp_path, capsys, monkeypatch):
    """Two contenders in processes of their own, and the profile of a step."""
    file = write_job(tmp_path)
    arguments = ["bench", "--step", str(file), "--steps", "2", "--csv", str(tmp_path / "rows.csv")]
    arguments += ["--training.seq_len=32", "--plot", str(tmp_path / "steps.png"), "--json"]
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    data = json.loads(captured.out)
    assert data["ok"] and data["mode"] == "step" and data["description"].endswith("2 x 32 tokens, float32")
    eager, jumar = data["contenders"]
    assert eager["name"] == "eager" and jumar["name"] == "jumar"
    assert len(jumar["seconds"]) == len(eager["seconds"]) == 2 and len(eager["losses"]) == 3
    assert jumar["losses"][0] == pytest.approx(eager["losses"][0], rel=1e-5)
    assert round(jumar["tokens"], 6) == 64 and jumar["peak"] > jumar["state"] > 0
    names = {row["operator"] for row in jumar["operators"]}
    assert {"jumar::npu_rms_norm", "jumar::npu_linear"} <= names
    assert not (tmp_path / "out").exists(), "nothing is written where the job would"
    with open(tmp_path / "rows.csv", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["contender"] for row in rows] == ["eager", "jumar"]
    assert float(rows[0]["to_jumar_minimum"]) == pytest.approx(eager["minimum"] / jumar["minimum"])
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes(tmp_path):
    file = write_job(tmp_path)
    for overrides, error in (
        (["model.flavour=x"], "unknown key 'model.flavour'"),
        (["optimizer.lr=fast"], "optimizer.lr"),
    ):
        with pytest.raises(command.BenchError, match=error):
            step.measure(str(file), overrides)
    with pytest.raises(command.BenchError, match="does not exist"):
        step.measure(str(tmp_path / "no.toml"), [])


def test_a_contender_that_cannot_start(tmp_path):
    """What the process says is the error, in one line."""
    file = write_job(tmp_path)
    form = Contender("jumar", ["training.seq_len=1000000", f"job.dump_folder={tmp_path / 'x'}"])
    with step._running([form], str(file), tmp_path) as (process,), pytest.raises(StepError) as caught:
        process.receive()
    assert "training.seq_len = 1000000 is more than the model's" in str(caught.value)
    assert process.process.returncode is not None
