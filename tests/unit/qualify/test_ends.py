# SPDX-License-Identifier: Apache-2.0
"""How the sessions' commands end: status, last words, and what is left where the next session looks for it."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from afd_plugin.config import GatePlacement
from afd_plugin.demo.service import ServiceError
from qualify import cells, native_control, package
from qualify.bench import __main__ as bench
from qualify.bench import cpu
from qualify.bundle import __main__ as bundle
from qualify.gpu import __main__ as gpu

# ---------------------------------------------------------------------------------------------- package


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed checkout with this project's metadata; the installation into a clean environment, which needs an
    index, is left out.
    """
    root = tmp_path / "project"
    (root / "afd_plugin").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        (root / name).write_bytes((package.ROOT / name).read_bytes())
    (root / "afd_plugin" / "__init__.py").write_text("def register() -> None: ...\n", encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, timeout=60)
    monkeypatch.setattr(package, "ROOT", root)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return root


def test_the_artifacts_that_passed_lie_in_dist_and_those_before_them_are_gone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in them is the commit's, so that anyone gets the same bytes."""
    given: list[tuple[str, str]] = []
    monkeypatch.setattr(
        package, "check_without_vllm", lambda wheel, _, version: given.append((wheel.name, version))
    )
    monkeypatch.setattr(package, "DISCOVER", "")
    (project / "dist").mkdir()
    (project / "dist" / "afd_plugin-0.27.0.tar.gz").touch()
    assert package.main() == 0
    wheel = "afd_plugin-0.28.0-py3-none-any.whl"
    assert given == [(wheel, "0.28.0")]
    assert {path.name for path in (project / "dist").iterdir()} == {wheel, "afd_plugin-0.28.0.tar.gz"}


def test_a_plugin_that_is_not_discovered_leaves_no_artifact(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault is printed, and `dist` is as it was."""
    monkeypatch.setattr(package, "check_without_vllm", lambda *_: None)
    monkeypatch.setattr(package, "DISCOVER", "raise SystemExit('found twice: {version}')")
    assert package.main() == 1
    assert "found twice: 0.28.0" in capsys.readouterr().err
    assert not (project / "dist").exists()


def test_a_project_without_a_version_is_refused(tmp_path: Path) -> None:
    """Nothing could be named after it."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    with pytest.raises(package.PackageError, match="states no version"):
        package.project_version(tmp_path)


def test_an_artifact_too_many_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set of artifacts is exact, not counted."""
    real = package.build

    def build(source: Path, out: Path, epoch: int) -> dict[str, str]:
        return real(source, out, epoch) | {"afd_plugin-0.28.0-cp311-linux.whl": "0"}

    monkeypatch.setattr(package, "build", build)
    with pytest.raises(package.PackageError, match=r"should not be there: afd_plugin-0\.28\.0-cp311"):
        package.build_twice(project, tmp_path / "scratch", 1_700_000_000)


# ---------------------------------------------------------------------------------------------- native control


@pytest.fixture
def right_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime is the cell; the operator and the servers are left out."""
    monkeypatch.setattr(native_control, "runtime", lambda _: None)
    monkeypatch.setattr(native_control, "OPERATOR", "print('operator fine')")
    monkeypatch.setattr(native_control, "make", Path)


@pytest.mark.usefixtures("right_cell")
def test_the_controls_measurements_reach_the_chain_model_by_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models are served without any plugin; each figure carries its model's name."""
    seen: list[str] = []

    def control(model: Path, folder: Path, environment: dict[str, str]) -> dict[str, float]:
        seen.append(environment["VLLM_PLUGINS"])
        return {"difference": 1e-5}

    monkeypatch.setattr(native_control, "control", control)
    monkeypatch.setenv(native_control.METRICS, str(tmp_path / "metrics.json"))
    assert native_control.main(["--cell", "cpu"]) == 0
    assert seen == ["", ""]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {
        f"{name}_difference": 1e-5 for name in native_control.MODELS
    }
    assert "operator fine" in capsys.readouterr().out


@pytest.mark.usefixtures("right_cell")
@pytest.mark.parametrize("stage", ["operator", "server"])
def test_an_operator_or_a_server_that_fails_fails_the_control(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own words, and without figures for the chain."""

    def control(*_: object) -> dict[str, float]:
        raise ServiceError("the server ended with 1")

    monkeypatch.setattr(native_control, "control", control)
    monkeypatch.setenv(native_control.METRICS, str(tmp_path / "metrics.json"))
    if stage == "operator":
        monkeypatch.setattr(native_control, "OPERATOR", "raise SystemExit('largest difference 3')")
    assert native_control.main(["--cell", "cpu", "--model", "qwen3-moe"]) == 1
    said = capsys.readouterr().err
    assert ("largest difference 3" if stage == "operator" else "the server ended with 1") in said
    assert not (tmp_path / "metrics.json").exists()


def test_a_gpu_cells_control_is_the_gpu_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cell's name, and its status."""
    given: list[list[str]] = []
    monkeypatch.setattr(gpu, "main", lambda words: given.append(words) or 2)
    assert native_control.main(["--cell", "h200x2"]) == 2
    assert given == [["control", "--cell", "h200x2", "--out", "out/gpu"]]


# ---------------------------------------------------------------------------------------------- GPU parts


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is the cell: its parts, its facts and its MPS daemon stand in."""
    monkeypatch.setattr(gpu, "refusal", lambda _: None)
    monkeypatch.setattr(gpu.probe, "ask", lambda _: {"gpus": ["one"]})
    monkeypatch.setattr(gpu.mps, "daemon", lambda: nullcontext(True))
    parts: dict[str, Any] = {"control": lambda host: {"passed": True, "n": host.setting("n", 0)}}
    monkeypatch.setattr(gpu, "PARTS", gpu.PARTS | parts | {"faults": lambda host: {"passed": False}})


@pytest.mark.usefixtures("gpu_host")
@pytest.mark.parametrize(("words", "mps"), [((), True), (("--no-mps",), False)])
def test_a_part_leaves_its_evidence_with_the_host_its_settings_and_its_command(
    words: tuple[str, ...], mps: bool, tmp_path: Path
) -> None:
    """Whoever reads it can run it again; the folders of this host are no part of it."""
    logs = str(tmp_path / "logs")
    assert (
        gpu.main(["control", "--out", str(tmp_path / "out"), "--logs", logs, "--option", "n=3", *words]) == 0
    )
    left = json.loads((tmp_path / "out" / "control.json").read_text())
    assert left["host"] == {"gpus": ["one"], "mps": mps}
    assert left["result"] == {"passed": True, "n": 3}
    assert left["command"][-2:] == ["--option", "n=3"]
    assert str(tmp_path) not in json.dumps(left)


@pytest.mark.usefixtures("gpu_host")
def test_one_part_that_does_not_pass_fails_the_command_and_the_next_still_runs(tmp_path: Path) -> None:
    """All that was asked for is on record."""
    assert gpu.main(["faults", "control", "--out", str(tmp_path), "--logs", str(tmp_path / "logs")]) == 1
    assert json.loads((tmp_path / "control.json").read_text())["result"]["passed"]


def test_a_gpu_that_torch_does_not_see_is_not_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver may answer where CUDA does not; the question is asked in a process of its own."""
    monkeypatch.setattr(gpu, "refusal", lambda _: None)
    monkeypatch.setattr(gpu.mps, "daemon", lambda: nullcontext(False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["control", "--out", str(tmp_path), "--logs", str(tmp_path / "logs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpu: this host is not the cell h200x1: ")
    assert "torch sees no CUDA GPU" in said
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "name a part or a --plan" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- others


def test_a_bundle_that_is_packed_says_how_it_is_unpacked_and_can_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of the size asked for; a folder that is not there is refused with its name."""
    site = tmp_path / "site"
    (site / "pkg").mkdir(parents=True)
    (site / "pkg" / "data").write_bytes(bytes(range(256)) * 8192)
    out = tmp_path / "parts"
    words = ["--out", str(out), "--part-mib", "1", "--compression", "none", "--python-version", "3.12"]
    assert bundle.main(["pack", "--site", str(site), *words]) == 0
    said = capsys.readouterr().out
    assert "1 files in 3 parts" in said
    assert "python3 parts/unpack.py parts CELL" in said
    assert bundle.main(["verify", str(out)]) == 0
    assert bundle.main(["pack", "--site", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 1
    assert "is no folder; `install` fills one" in capsys.readouterr().err


def test_the_digests_of_all_locks_are_written_into_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nox -s lock` ends with it: a digest that no longer holds is replaced, what is right stays as it is."""
    text = cells.CELLS.read_text(encoding="utf-8")
    target = tmp_path / "cells.toml"
    target.write_text(text.replace(cells.load("h200x1").lock_digest(), "0" * 64), encoding="utf-8")
    monkeypatch.setattr(cells, "CELLS", target)
    assert cells.main() == 0
    assert target.read_text(encoding="utf-8") == text


def test_a_bench_leaves_its_figures_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model that was named, in order; without a name the small one."""
    native = {"native": cpu.asdict(cpu.cost([4.0], [4.0], {}))}
    measured = {"repeats": 1, "tokens": 9, "limit_ms": 0.4, "services": native}
    monkeypatch.setattr(cpu, "run", lambda name: {"model": name} | measured)
    monkeypatch.setattr(bench, "OUTPUT", tmp_path / "out")
    assert bench.main(["cpu", "qwen3-moe", "deepseek-v3"]) == 0
    report = json.loads((tmp_path / "out" / "bench-cpu.json").read_text())
    assert [result["model"] for result in report] == ["qwen3-moe", "deepseek-v3"]
    assert "bench-cpu.json" in capsys.readouterr().out
    assert bench.main([]) == 0
    assert "deepseek-v2" in (tmp_path / "out" / "bench-cpu.json").read_text()


def test_a_bench_serves_native_and_both_places_of_the_gate() -> None:
    """Side by side in one run, with the same arguments but for the gate."""
    made = cpu.commands()
    assert list(made) == ["native", *(f"gate-on-{gate.value}" for gate in GatePlacement)]
    engine = cpu.EngineArguments()
    words = {name: command(Path("m"), "n", 1, engine) for name, command in made.items()}
    for gate in ("attention", "ffn"):
        mine = words[f"gate-on-{gate}"]
        position = mine.index("--gate")
        assert mine[position - 1 : position + 2] == ["serve", "--gate", gate]
    assert "--gate" not in words["native"]
