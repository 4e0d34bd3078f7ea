from __future__ import annotations

import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parts.patience import PATIENCE_S
from polyturn.errors import ResourceError
from polyturn.metrics.names import STABLE_LINE
from polyturn.metrics.sinks import ConsoleSink, JsonlSink, MetricsLog, ProgressSink, four_digits


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.steps: list[int] = []
        self.closes = 0
        self.error = error

    def write(self, step, values):
        self.steps.append(step)

    def close(self):
        self.closes += 1
        if self.error:
            raise self.error


def test_jsonl_has_one_readable_line_a_step_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(
        1,
        {"loss": np.float32(0.5), "num_faults": np.int64(3), "reward": math.nan, "kl": math.inf, "grad_norm": None, "step": 9},
    )
    assert json.loads(path.read_text()) == {
        "step": 1,
        "loss": 0.5,
        "num_faults": 3,
        "reward": None,
        "kl": None,
        "grad_norm": None,
    }
    sink.write(2, {})
    sink.close()
    sink.close()
    assert path.read_text().count("\n") == 2


def test_jsonl_appends_to_what_is_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with MetricsLog([JsonlSink(path)]) as log:
        log.write(2, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_jsonl_refuses_what_is_no_number_and_says_when_the_disk_is_full(tmp_path):
    sink = JsonlSink(tmp_path / "a.jsonl")
    with pytest.raises(TypeError, match="metric loss is a str"):
        sink.write(1, {"loss": "0.5"})
    sink.close()
    with pytest.raises(ResourceError, match="can't be opened"):
        JsonlSink(tmp_path / "no" / "a.jsonl")
    if Path("/dev/full").exists():
        sink = JsonlSink("/dev/full")
        with pytest.raises(ResourceError, match=r"/dev/full: can't be written \(No space left on device\)"):
            sink.write(1, {})
        with pytest.raises(ResourceError, match="can't be written"):
            sink.close()
        sink.close()


def test_the_stable_line_has_a_fixed_order_and_four_digits(capsys):
    values = {"policy_age": 0, "tokens_per_s": 123456.7, "loss": -0.0123456, "reward": 0.41, "kl": 3.0, "time/rollout_s": 1.0}
    ConsoleSink().write(12, values)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step=12 reward=0.41 loss=-0.01235 tokens_per_s=123500 policy_age=0 success=nan grad_norm=nan")
    assert [word.split("=")[0] for word in line.split(" ")] == list(STABLE_LINE)
    assert STABLE_LINE[:5] == ("step", "reward", "loss", "tokens_per_s", "policy_age"), "scripts read it: only add at the end"


def test_a_missing_number_is_nan_and_an_evaluation_has_its_own_line(capsys):
    sink = ConsoleSink()
    sink.write(1, {"reward": 0.5, "eval/reward": 0.25, "eval/success": 0.125, "eval_greedy/success": 1.0})
    stable, *evaluations = capsys.readouterr().out.splitlines()
    assert stable.startswith("step=1 reward=0.5 loss=nan tokens_per_s=nan policy_age=nan success=nan grad_norm=nan")
    assert evaluations == [
        "eval step=1 success=0.125 reward=0.25",
        "eval_greedy step=1 success=1",
    ]
    sink.write(0, {"eval/success": 0.1, "time/eval_s": 3.0, "policy_version": 0})
    assert capsys.readouterr().out == "eval step=0 success=0.1\n"


def test_a_reader_that_leaves_does_not_end_the_run():
    code = (
        "from polyturn.metrics.sinks import ConsoleSink\n"
        "import sys\n"
        "sink = ConsoleSink()\n"
        "for step in range(20000): sink.write(step, {'loss': 1.0})\n"
        "print('survived', file=sys.stderr)\n"
        "sys.stdout = None\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stdout.readline().startswith("step=0")
    run.stdout.close()
    assert "survived" in run.stderr.read()
    run.stderr.close()
    run.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.41, "0.41"),
        (0.123456, "0.1235"),
        (1.0, "1"),
        (12, "12"),
        (123456, "123456"),
        (123456.0, "123500"),
        (999.96, "1000"),
        (1234.5678, "1235"),
        (1e-6, "1e-06"),
        (-2500.4, "-2500"),
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1e20, "1e+20"),
        (None, "nan"),
        (np.float32(0.5), "0.5"),
    ],
)
def test_four_digits(number, shown):
    assert four_digits(number) == shown


def test_the_log_fans_out_closes_twice_and_refuses_after():
    first, second = Recorder(), Recorder()
    log = MetricsLog([first, second])
    log.write(1, {})
    log.close()
    log.close()
    assert first.steps == second.steps == [1]
    assert (first.closes, second.closes) == (1, 1)
    with pytest.raises(ValueError, match="step 2 came after the log was closed"):
        log.write(2, {})


def test_every_sink_is_closed_when_one_fails():
    sinks = [Recorder(), Recorder(OSError("disk")), Recorder()]
    with pytest.raises(OSError, match="disk"):
        MetricsLog(sinks).close()
    assert [sink.closes for sink in sinks] == [1, 1, 1]


def test_progress_is_silent_where_stderr_is_no_terminal(capsys):
    sink = ProgressSink(3)
    sink.write(1, {"reward": 1.0})
    sink.close()
    sink.close()
    assert capsys.readouterr() == ("", "")


def test_progress_draws_on_a_terminal_and_leaves_stdout_alone():
    code = (
        "from polyturn.metrics.sinks import ConsoleSink, MetricsLog, ProgressSink\n"
        "with MetricsLog([ProgressSink(2), ConsoleSink()]) as log:\n"
        "    log.write(1, {'reward': 0.5, 'loss': 1.0})\n"
        "    log.write(2, {'reward': 0.75, 'loss': 1.0})\n"
        "    log.write(2, {'time/eval_s': 1.0})\n"
    )
    reader, writer = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True, env=environment)
    out, _ = run.communicate(timeout=PATIENCE_S)
    os.close(writer)
    drawn = b""
    try:
        while chunk := os.read(reader, 65536):
            drawn += chunk
    except OSError:
        pass  # how a terminal whose other end is closed says that nothing is left
    os.close(reader)
    assert run.returncode == 0, drawn.decode()
    assert [line.split(" loss")[0] for line in out.splitlines()] == ["step=1 reward=0.5", "step=2 reward=0.75"]
    assert "\x1b" not in out
    assert b"training" in drawn
    assert b"2/2" in drawn
    assert b"reward 0.75" in drawn
