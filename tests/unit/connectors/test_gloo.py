# SPDX-License-Identifier: Apache-2.0
from tests.unit.connectors.contract import ContractSuite


class TestGloo(ContractSuite):
    connector = "GlooAFDConnector"
    environment = {"VLLM_TARGET_DEVICE": "cpu"}  # noqa: RUF012 - a constant of the suite
