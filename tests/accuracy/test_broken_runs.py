# SPDX-License-Identifier: Apache-2.0
"""A server that is not there, or does not serve the model, gives a failure and no score."""

from pathlib import Path

import pytest

from afd_plugin.supervisor.ports import PortReservation
from qualify.accuracy import data, gate, harness
from qualify.accuracy.architectures import QWEN3_MOE
from qualify.accuracy.harness import HarnessFailed, Spec

pytestmark = [pytest.mark.timeout(300)]


def test_a_wrong_url_is_a_failure_and_no_score(trained: dict[str, Path], tmp_path: Path) -> None:
    questions = tmp_path / "questions"
    questions.mkdir()
    tasks = tuple(data.write(questions, data.MIXES[QWEN3_MOE.name], 2))
    output = tmp_path / "lm-eval.json"
    with PortReservation() as port:
        url = f"http://127.0.0.1:{port.port}/v1/completions"
        spec = Spec(url, "m", str(trained[QWEN3_MOE.name]), tasks, 512, str(output))
        with pytest.raises(HarnessFailed, match="refused"):
            harness.run(spec, questions, tmp_path / "lm-eval", 200)
    assert not output.exists()


def test_without_the_end_to_end_gate_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.main(["--cell", "cpu", "--evidence", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "no PASS of the end-to-end gate" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
