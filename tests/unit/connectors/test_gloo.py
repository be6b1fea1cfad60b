# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.unit.connectors.contract import ContractSuite
from tests.unit.connectors.team import START_S

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(START_S + 60)  # whichever test comes first waits for vLLM's import


class TestGloo(ContractSuite):
    connector = "GlooAFDConnector"
    environment = ENVIRONMENT
