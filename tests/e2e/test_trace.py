# SPDX-License-Identifier: Apache-2.0
"""What a running service takes from vLLM's objects is what the seam registry says, seen while it happens."""

import dataclasses
import json
from pathlib import Path

import pytest

from afd_plugin.config import Role
from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.prompts import PROMPTS
from afd_plugin.seams import REGISTRY
from afd_plugin.seams.schema import Registry
from qualify.audit import trace, traced
from qualify.audit.coverage import Coverage
from qualify.audit.symbols import Symbol, Use
from qualify.audit.upstream import Upstream
from tests.e2e.services import afd_serve, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def uses(
    checkpoints: dict[str, Path], python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Use], set[Role]]:
    """Every read of a vLLM attribute by our code in a 1A1F service, and the roles whose code ran traced."""
    folder = tmp_path_factory.mktemp("traced")
    variables = trace.environment(folder / "traces", {})
    with running(
        afd_serve(python), checkpoints["deepseek-v3"], EngineArguments(), folder / "service", **variables
    ) as service:
        for prompt in PROMPTS[:2]:
            service.endpoint.complete(prompt, max_tokens=4)
    paths = {
        json.loads(line)["path"]
        for file in (folder / "traces").glob("**/trace-*.jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    }
    roles = {role for role in Role if f"afd_plugin/v1/worker/{role.value}_role.py" in paths}
    seen = traced.uses([folder / "traces"], Upstream.installed(), Coverage(REGISTRY).named)
    found = [use for use in seen if isinstance(use, Use)]
    return found, roles


def test_a_running_service_uses_nothing_of_vllm_that_the_registry_does_not_name(
    uses: tuple[list[Use], set[Role]],
) -> None:
    found, roles = uses
    assert roles == set(Role)
    assert len({use.symbol for use in found}) > 50
    coverage = Coverage(REGISTRY)
    coverage.take(found)
    assert sorted(map(str, coverage.uncovered)) == []


def test_a_name_that_is_struck_from_the_registry_is_missed_in_the_same_run(
    uses: tuple[list[Use], set[Role]],
) -> None:
    found, _ = uses
    used = {use.symbol for use in found}
    surface, name = next(
        (surface, name)
        for surface in REGISTRY.surfaces
        for name in surface.names
        if Symbol.parse(surface.owner).member(name) in used
    )
    names = {other: digest for other, digest in surface.names.items() if other != name}
    shorter = dataclasses.replace(surface, names=names)
    poorer = Coverage(
        Registry(REGISTRY.seams, tuple(shorter if entry is surface else entry for entry in REGISTRY.surfaces))
    )
    poorer.take(found)
    assert {use.symbol for use in poorer.uncovered} == {Symbol.parse(surface.owner).member(name)}
