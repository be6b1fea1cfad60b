# SPDX-License-Identifier: Apache-2.0
"""What a build must know of this host and no image may keep: the CA bundle, and where packages come from.

Both are given as build secrets: files that exist during one step of a build and are part of no layer.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from qualify.process import capture

_BUNDLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SYSTEM_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_PREFIXES = ("PIP_", "UV_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def bundle(environment: Mapping[str, str]) -> Path | None:
    """The CA bundle that this host's clients use, if there is one."""
    for candidate in (*(environment.get(name, "") for name in _BUNDLES), _SYSTEM_BUNDLE):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


def is_local(value: str) -> bool:
    """Whether a setting names something of this host's disk, which a build cannot see."""
    return any(word.startswith(("/", "~", "file:", ".")) for word in value.split())


def index_settings(environment: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell pip and uv where packages come from: the environment's, then pip's own settings.

    `configured` is what `pip config list` says (`global.NAME`: value). Of pip's settings only addresses are taken.
    """
    settings = {
        f"PIP_{name.partition('.')[2].upper().replace('-', '_')}": value
        for name, value in configured.items()
        if name.startswith(("global.", "install.")) and "://" in value
    }
    settings |= {name: value for name, value in environment.items() if name.upper().startswith(_PREFIXES)}
    return {name: value for name, value in sorted(settings.items()) if value and not is_local(value)}


def written(folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Write the secrets into `folder`: `index`, a shell file, and `ca` where the host has a bundle."""
    environment = os.environ if environment is None else environment
    index = folder / "index"
    lines = (
        f"export {k}={shlex.quote(v)}\n" for k, v in index_settings(environment, _pip_settings()).items()
    )
    index.write_text("".join(lines), encoding="utf-8")
    secrets = {"index": index}
    if found := bundle(environment):
        secrets["ca"] = folder / "ca"
        secrets["ca"].write_bytes(found.read_bytes())
    for path in secrets.values():
        path.chmod(0o600)
    return secrets


def _pip_settings() -> dict[str, str]:
    printed = capture([sys.executable, "-m", "pip", "config", "list"], check=False).stdout
    pairs = (line.partition("=") for line in printed.splitlines())
    return {name: str(ast.literal_eval(value)) for name, _, value in pairs if value}


def plain_environment() -> dict[str, str]:
    """What the builder's client itself needs of the environment; nothing that names an index or another engine."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ}
