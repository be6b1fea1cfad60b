# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from afd_plugin.seams.schema import Registry, Surface
from qualify.audit import trace, traced
from qualify.audit.__main__ import Audit
from qualify.audit.coverage import Coverage
from qualify.audit.symbols import Use
from tests.unit.audit import tree

RUN = """
    import dataclasses
    import sys

    import plug.worker
    from vllm.config import ParallelConfig


    @dataclasses.dataclass
    class Kept:
        kind: sys.version_info.__class__ | None = None
        __hidden: int = 1

        def hidden(self) -> int:
            return self.__hidden


    def untyped(worker):
        return worker.extra, worker.load_model


    def main() -> None:
        worker = plug.worker.OurWorker(ParallelConfig())
        assert worker.init_device() == 1
        untyped(worker)
        assert Kept().hidden() == 1
        match sys.byteorder:
            case sys.byteorder:
                print("done")


    if __name__ == "__main__":
        main()
    """
CHECKOUT = Path(trace.__file__).resolve().parents[2]


def traced_run(root: Path) -> Path:
    """Run the module above, traced, in a process of its own; the folder with the traces."""
    tree.upstream(root)
    tree.package(root, runs=RUN)
    starter = (
        f"import sys; sys.path[:0] = [{str(root)!r}, {str(CHECKOUT)!r}]\n"
        "from pathlib import Path; from qualify.audit import trace\n"
        f"trace.install(Path({str(root / 'traces')!r}), 'plug')\n"
        "import plug.runs; plug.runs.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", starter], capture_output=True, text=True, timeout=60, check=True, cwd=root
    )
    assert done.stdout == "done\n"
    return root / "traces"


def test_a_traced_run_records_what_the_type_checker_cannot_see(tmp_path: Path) -> None:
    upstream = tree.upstream(tmp_path)
    found = {
        f"{u.path}:{u.symbol}"
        for u in traced.uses([traced_run(tmp_path)], upstream, frozenset())
        if hasattr(u, "symbol")
    }
    assert "plug/runs.py:vllm.worker:Worker.extra" in found
    assert "plug/runs.py:vllm.worker:Worker.load_model" in found
    assert "plug/worker.py:vllm.worker:Worker.init_device" in found
    assert "plug/worker.py:vllm.worker:Worker.rank" in found


def test_the_audit_demands_entries_for_what_a_trace_holds(
    audited: Callable[..., Audit], tmp_path: Path
) -> None:
    audit = audited(traces=(traced_run(tmp_path),), runs="")
    found = {f.message.split(",")[0] for f in audit.findings if f.path == "plug/runs.py"}
    assert found == {"reads vllm.worker:Worker.extra", "reads vllm.worker:Worker.load_model"}


def test_a_trace_folder_without_traces_is_a_finding(audited: Callable[..., Audit], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert [f.rule for f in audited(traces=(tmp_path / "empty",)).findings] == ["trace"]


def test_the_environment_makes_one_general_plugin_discoverable(tmp_path: Path) -> None:
    variables = trace.environment(tmp_path, base={"PYTHONPATH": "/elsewhere"})
    paths = variables["PYTHONPATH"].split(":")
    assert paths[1:] == [str(CHECKOUT), "/elsewhere"]
    assert variables[trace.VARIABLE] == str(tmp_path)
    [entry] = [e for d in distributions(path=[paths[0]]) for e in d.entry_points]
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is trace.register


def test_records_are_written_at_once_and_once(tmp_path: Path) -> None:
    lines = [
        json.loads(line) for f in traced_run(tmp_path).glob("*.jsonl") for line in f.read_text().splitlines()
    ]
    assert lines
    assert len({json.dumps(line) for line in lines}) == len(lines)


def test_a_read_through_a_subclass_is_the_use_that_the_registry_names(tmp_path: Path) -> None:
    upstream = tree.upstream(tmp_path)
    (tmp_path / "trace-1.jsonl").write_text(
        json.dumps(
            {
                "owners": ["vllm.worker:FastWorker", "vllm.worker:Worker"],
                "name": "rank",
                "path": "plug/worker.py",
                "line": 1,
            }
        )
        + "\n",
        encoding="utf-8",
    )
    named = Registry((), (Surface("worker-plain", "vllm.worker:Worker", {"rank": ""}, "", ()),))

    def symbols(registry: Registry) -> list[str]:
        return [
            str(u.symbol)
            for u in traced.uses([tmp_path], upstream, Coverage(registry).named)
            if isinstance(u, Use)
        ]

    assert symbols(Registry(())) == ["vllm.worker:FastWorker.rank"]
    assert symbols(named) == ["vllm.worker:Worker.rank"]
