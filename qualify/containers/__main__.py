# SPDX-License-Identifier: Apache-2.0
"""`nox -s containers -- probe | build CELL | run SESSION [ARGUMENTS] | shell | digest | sweep | discard | test`.

`build` makes the image of a cell; `run` runs a nox session in it: this checkout copied in, no network, no root;
`shell` opens one there; `digest` says what the image holds; `probe` says whether there is an engine at all; `sweep`
removes what a killed driver left; `discard` removes our own engine with everything it holds; `test` shows that nothing
is left. The exit status is the session's; 3 where no engine can be had, 2 where something else is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from docker.errors import DockerException

from afd_plugin.supervisor.signals import leave_by_exit
from qualify.cells import CellError
from qualify.containers import checkout, container, image, tree
from qualify.containers.engine import Engine, EngineError, NoEngine, discard, opened
from qualify.environment import SetupError
from qualify.process import CommandError

LIMIT_S = 2400.0
NO_ENGINE = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s containers --", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--engine", choices=["host", "own"], default="host", help="own: dockerd, started here"
    )
    celled = argparse.ArgumentParser(add_help=False)
    celled.add_argument("--cell", default="cpu", help="a cell of containers/cells.toml")
    what = parser.add_subparsers(dest="what", required=True)
    build = what.add_parser("build", parents=[common], help="make the image of a cell")
    build.add_argument("cell", help="a cell of containers/cells.toml")
    build.add_argument("--base", default="rootfs", help="rootfs: from Debian packages; or NAME@sha256:DIGEST")
    build.add_argument("--fresh", action="store_true", help="use no layer that stands already")
    run = what.add_parser("run", parents=[common, celled], help="run a nox session in a cell's image")
    run.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which it is ended")
    run.add_argument("session", help="a session of the noxfile")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="what the session is given")
    what.add_parser("shell", parents=[common, celled], help="a shell in a cell's image")
    digest = what.add_parser("digest", parents=[common, celled], help="one digest of all that an image holds")
    digest.add_argument("--out", type=Path, help="write every entry here, too")
    digest.add_argument("--against", type=Path, help="such a file of another build: name what differs")
    what.add_parser("probe", parents=[common], help="whether an engine answers or can be started")
    what.add_parser("discard", help="remove our own engine's data root with all that it holds")
    what.add_parser("test", help="the tests of a container's life, in an engine of their own")
    what.add_parser("sweep", parents=[common], help="remove containers of drivers that live no more")
    return parser


def _session(engine: Engine, chosen: argparse.Namespace) -> int:
    made = image.recipe(chosen.cell)
    identity = image.standing(engine, made)
    with checkout.archived(image.ROOT) as archive:
        if chosen.what == "shell":
            job = container.Job(identity, [], 86400.0, archive=archive, gpus=made.cell.devices)
            return container.shell(engine, job)
        words = made.words(chosen.session, chosen.arguments)
        print(f"in {made.tag}, without a network, as {container.USER}: {' '.join(words)}", flush=True)
        job = container.Job(identity, words, chosen.limit, {"NO_COLOR": "1"}, archive, gpus=made.cell.devices)
        return container.run(engine, job)


def _digest(engine: Engine, chosen: argparse.Namespace) -> int:
    made = image.recipe(chosen.cell)
    seen = tree.of_image(engine, image.standing(engine, made))
    print(f"{made.tag}: {len(seen)} entries, tree {tree.digest(seen)}")
    if chosen.out:
        chosen.out.write_text(json.dumps(seen, indent=0, sort_keys=True), encoding="utf-8")
    if not chosen.against:
        return 0
    names = tree.changed(seen, json.loads(chosen.against.read_text(encoding="utf-8")))
    print(*names, f"{len(names)} entries differ", sep="\n")
    return 1 if names else 0


def _probe(engine: Engine) -> int:
    about = engine.client.info()
    print(f"engine {about['ServerVersion']}, storage {about['Driver']}, data in {about['DockerRootDir']}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of what ran in the container; NO_ENGINE without an engine and 2 otherwise, with the reason."""
    chosen = _parser().parse_args(arguments)
    if chosen.what == "test":
        words = [sys.executable, "-m", "pytest", str(image.ROOT / "tests/containers")]
        return subprocess.run(words, check=False, timeout=LIMIT_S).returncode
    try:
        if chosen.what == "discard":
            print(f"removed {discard()}")
            return 0
        with opened(chosen.engine) as engine:
            if chosen.what == "probe":
                return _probe(engine)
            if chosen.what == "build":
                made = image.recipe(chosen.cell)
                print(f"{made.tag} is {image.build(engine, made, chosen.base, fresh=chosen.fresh)}")
                return 0
            if chosen.what == "sweep":
                print(*container.sweep(engine), sep="\n")
                return 0
            return _digest(engine, chosen) if chosen.what == "digest" else _session(engine, chosen)
    except NoEngine as error:
        print(f"containers: no engine: {' | '.join(str(error).splitlines())}", file=sys.stderr)
        return NO_ENGINE
    except (EngineError, CellError, CommandError, SetupError, DockerException) as error:
        print(f"containers: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main())
