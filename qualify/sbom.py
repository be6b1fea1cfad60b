# SPDX-License-Identifier: Apache-2.0
"""The bill of materials of a release in CycloneDX: what the package declares, resolved as its lock pins it."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.licenses import canonicalize_license_expression

from qualify import locks
from qualify.cells import ROOT

LICENSE = canonicalize_license_expression("Apache-2.0")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def bill(version: str, root: Path = ROOT) -> str:
    """The bill as JSON; the same lock gives the same text, so it has no date and a name made of its content."""
    pins = locks.parse((root / "containers" / "light" / "requirements.lock").read_text(encoding="utf-8"))
    own = Component(
        name="afd-plugin",
        version=version,
        type=ComponentType.APPLICATION,
        purl=PackageURL("pypi", name="afd-plugin", version=version),
        bom_ref="afd-plugin",
        licenses=[LicenseExpression(LICENSE)],
    )
    parts = [
        Component(
            name=pin.name,
            version=pin.version,
            type=ComponentType.LIBRARY,
            purl=PackageURL("pypi", name=pin.name, version=pin.version),
            bom_ref=f"{pin.name}=={pin.version}{f' ; {pin.marker}' if pin.marker else ''}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in _HASH.findall(pin.text)],
        )
        for pin in pins
    ]
    content = "".join(pin.text for pin in pins) + version
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, content), components=parts)
    bom.metadata.component = own
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.register_dependency(own, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
