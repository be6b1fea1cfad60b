# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from afd_plugin.config import LinkSettings
from afd_plugin.connectors.base import ConnectorShape
from afd_plugin.connectors.gloo import GlooAFDConnector
from afd_plugin.errors import RendezvousTimeout
from tests.unit.connectors.contract import ContractSuite
from tests.unit.connectors.scenarios import UNITS
from tests.unit.connectors.team import START_S

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(START_S + 60)  # whichever test comes first waits for vLLM's import


class TestGloo(ContractSuite):
    connector = "GlooAFDConnector"
    environment = ENVIRONMENT


def test_a_lane_that_never_comes_is_an_error_within_the_bound() -> None:
    """Torch would wait for half an hour, with an error of its own."""
    shape = ConnectorShape(1, None, 4, 8, torch.bfloat16, torch.device("cpu"), UNITS)
    ffn = GlooAFDConnector(shape, LinkSettings(token="t", rendezvous_timeout_s=0.5))
    data = ffn.offer()
    with pytest.raises(RendezvousTimeout, match=r"2 ends did not form within 0.5 s"):
        ffn.connect(data)
    ffn.close()
