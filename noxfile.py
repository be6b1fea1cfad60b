# SPDX-License-Identifier: Apache-2.0

# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.2.9"]
# ///
"""Sessions: each one's docstring says what it promises. The logic is in `qualify/`, tested by itself.

All run in one environment, which the first session makes (docs/toolchain.md). `nox -l` lists them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from qualify import environment, locks  # noqa: E402
from qualify.gpu import cell as gpu_cell  # noqa: E402
from qualify.process import CommandError  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typecheck", "unit", "package", "audit"]
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = True

STOPPING_S = 120.0
"""What a command has after Ctrl-C to end what it started and to write it down; nox's own is a third of a second."""


class Cell:
    """The shared environment as a session uses it."""

    def __init__(self, session: nox.Session) -> None:
        self._session = session
        try:
            self._environment = environment.ensure(checkout=ROOT)
        except (environment.SetupError, CommandError) as error:
            session.error(str(error))

    def python(self, *arguments: str) -> None:
        """Run the environment's interpreter."""
        self._run(str(self._environment.python), *arguments)

    def tool(self, name: str, *arguments: str) -> None:
        """Run a command of the environment."""
        self._run(self._environment.tool(name), *arguments)

    def _run(self, *command: str) -> None:
        self._session.run(
            *command,
            env=self._environment.variables(),
            include_outer_env=False,
            external=True,
            interrupt_timeout=STOPPING_S,
        )


class Host:
    """On a GPU host: the Python that runs nox, with what is installed or unpacked beside it; nothing is made."""

    def __init__(self, session: nox.Session) -> None:
        self._session = session

    def python(self, *arguments: str) -> None:
        """Run that interpreter, with the caller's environment: the bundle lives in it."""
        self._session.run(sys.executable, *arguments, external=True, interrupt_timeout=STOPPING_S)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Make small checkpoints, serve each natively and as attention + FFN, compare, print a table.

    Needs no GPU and no download beyond the environment. Writes `demo-report.json`; exits non-zero when a
    token or a logprob differs. Arguments after `--` go to `afd demo`.
    """
    Cell(session).python("-m", "afd_plugin.cli", "demo", *session.posargs)


@nox.session(default=False)
def afd(session: nox.Session) -> None:
    """Run the `afd` command in the shared environment: `nox -s afd -- serve MODEL`."""
    Cell(session).python("-m", "afd_plugin.cli", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, layering and the project's own rules hold in every tracked file. `-- --fix` mends."""
    cell = Cell(session)
    fix = ["--fix"] if "--fix" in session.posargs else []
    cell.tool("ruff", "check", *fix, ".")
    cell.tool("ruff", "format", *([] if fix else ["--check"]), ".")
    cell.tool("lint-imports", "--no-cache")
    cell.tool("zizmor", "--offline", "--quiet", ".github/workflows")
    cell.python("-m", "qualify.lint", *fix)


@nox.session
def typecheck(session: nox.Session) -> None:
    """`afd_plugin`, `qualify` and this file pass the strict type checker against the installed vLLM."""
    Cell(session).python("-m", "mypy", *session.posargs)


@nox.session
def unit(session: nox.Session) -> None:
    """The tests that start no engine pass and cover 90% of `qualify` (lines, branches). Arguments go to pytest."""
    covered = ["--cov=qualify", "--cov-report=term", "--cov-fail-under=90"]
    options = session.posargs or ["tests/unit", *covered, "--durations=10"]
    Cell(session).python("-m", "pytest", *options)


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the sdist build twice to the same bytes, hold exactly the tracked files and install.

    In an environment without vLLM the package imports, `afd --version` and `afd --help` work and nothing
    heavy is loaded; beside vLLM the plugin is discovered exactly once. The artifacts lie in `dist/`.
    """
    Cell(session).python("-m", "qualify.package", *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Every use of vLLM is a registered seam and every seam's upstream source is unchanged."""
    Cell(session).python("-m", "qualify.audit", *session.posargs)


@nox.session(default=False)
def e2e(session: nox.Session) -> None:
    """Real vLLM engines on the CPU: parity with native serving, faults, refusals. Arguments go to pytest.

    `-- all` runs the whole chaos and topology matrices, too; `-- all --shard 1/6` one of six parts of it.
    """
    options = session.posargs or ["tests/e2e", "--durations=20"]
    if options[0] == "all":
        options = ["tests/e2e", "--durations=20", "--full", *options[1:]]
    Cell(session).python("-m", "pytest", *options)


@nox.session(default=False)
def abi(session: nox.Session) -> None:
    """The extension of `csrc/` builds (nvcc 13.0) and needs and holds exactly what is declared."""
    Cell(session).python("-m", "qualify.abi", *session.posargs)


@nox.session(default=False)
def native_control(session: nox.Session) -> None:
    """vLLM without AFD serves the test models here, and agrees with an oracle that is not vLLM.

    On a GPU cell there is no oracle: one model answers with as many tokens as asked for, and the extension's kernels
    are exact.
    """
    if gpu_cell.asks_for_gpu(session.posargs):
        Host(session).python("-m", "qualify.gpu", "control", "--out", "out/gpu", *session.posargs)
    else:
        Cell(session).python("-m", "qualify.native_control", *(session.posargs or ["--cell", "cpu"]))


@nox.session(default=False)
def gpu_e2e(session: nox.Session) -> None:
    """Real engines on this host's GPUs: contract, parity, faults, service. `-- all` is everything.

    Runs in the Python that runs nox, which on a host without an index is the bundle's. On a host that is not the cell
    it refuses in one line and fails; it never skips. `-- --cell h200x2` needs two GPUs.
    """
    Host(session).python("-m", "qualify.gpu.e2e", *session.posargs)


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Pack the cell's site-packages (and Python, with `--python`) into parts with checksums, and `unpack.py`.

    `nox -s bundle -- pack --site SITE --out FOLDER [--part-mib 48]`, `-- verify FOLDER`; for hosts without an index.
    """
    Host(session).python("-m", "qualify.bundle", *session.posargs)


@nox.session(default=False)
def accuracy(session: nox.Session) -> None:
    """AFD answers trained models' questions as rightly as native vLLM, row by row (docs/accuracy.md).

    Needs the end-to-end gate of this revision on record; `-- --diagnostic` measures without it. `-- power` plants
    faults and checks that each is caught: arguments after it go to pytest.
    """
    options = session.posargs or ["--cell", "cpu"]
    if gpu_cell.asks_for_gpu(options):
        Host(session).python("-m", "qualify.gpu.accuracy_gate", *options)
    elif options[0] == "power":
        Cell(session).python("-m", "pytest", "tests/accuracy", "--durations=20", *options[1:])
    else:
        Cell(session).python("-m", "qualify.accuracy", *options)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """The documents claim what the evidence shows, pin one version, and name what exists. `-- --write` renews."""
    Cell(session).python("-m", "qualify.docs", *session.posargs)


@nox.session(default=False)
def cases(session: nox.Session) -> None:
    """Renew the lists of test cases that the gate demands (`qualify/cases/`) from what pytest collects now."""
    Cell(session).python("-m", "qualify.expected", *session.posargs)


@nox.session(default=False)
def final_audit(session: nox.Session) -> None:
    """Every record that a chain must have is there, for exactly this revision, cell, lock and environment."""
    where = Host(session) if gpu_cell.asks_for_gpu(session.posargs) else Cell(session)
    where.python("-m", "qualify.final_audit", *session.posargs)


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """The chain of sessions on one cell, a record for each: `nox -s gate -- --cell cpu [--profile landing]`.

    Of a GPU cell, on its host, what needs the GPU: the rest is the CPU cell's chain at the same revision.
    `-- planted` plants faults in clones of this checkout and sees real sessions and chains refuse them (half an hour).
    """
    if gpu_cell.asks_for_gpu(session.posargs):
        Host(session).python("-m", "qualify.gate", *session.posargs)
    elif session.posargs[:1] == ["planted"]:
        Cell(session).python("-m", "pytest", "tests/gate", *session.posargs[1:])
    else:
        Cell(session).python("-m", "qualify.gate", *session.posargs)


@nox.session(default=False)
def containers(session: nox.Session) -> None:
    """A cell as a container: `-- build cpu`, `-- run unit` (no network, no root), `-- shell`; `-- --help` says more."""
    Cell(session).python("-m", "qualify.containers", *session.posargs)


@nox.session(default=False)
def release_artifacts(session: nox.Session) -> None:
    """Add the bill of materials (CycloneDX) and the sums to the wheel and sdist that `package` left in `dist/`."""
    Cell(session).python("-m", "qualify.release", "--artifacts")


@nox.session(default=False)
def release_check(session: nox.Session) -> None:
    """Whether a tag may be released: `nox -s release_check -- v0.28.0`. Prints the push command, pushes nothing."""
    Cell(session).python("-m", "qualify.release", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure AFD against native vLLM side by side: `nox -s bench -- cpu` or `-- gpu`."""
    lane, *rest = session.posargs or ["cpu"]
    if lane == "gpu":
        Host(session).python("-m", "qualify.gpu", "exchange", "bench", "--out", "out/gpu", *rest)
    else:
        Cell(session).python("-m", "qualify.bench", *session.posargs)


@nox.session(default=False)
def lookahead(session: nox.Session) -> None:
    """Which registered seams a newer vLLM breaks, and how, from its wheel alone: `nox -s lookahead -- 0.30.0`."""
    Cell(session).python("-m", "qualify.upgrade", "lookahead", *session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Resolve the locks under `containers/` again (needs an index); `-- --upgrade` takes the newest."""
    cells = environment.cells_directory()
    cells.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        uv = environment.find_uv(cells)
        locks.compile_all(uv, ROOT, Path(scratch), upgrade="--upgrade" in session.posargs)
    Cell(session).python("-m", "qualify.cells")
