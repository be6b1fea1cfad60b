# SPDX-License-Identifier: Apache-2.0
"""The connector contract on GPUs; `nox -s gpu_e2e`. Several ends share one GPU through CUDA IPC."""

import pytest

from tests.unit.connectors.contract import Processes, StreamOrderedSuite
from tests.unit.connectors.team import START_S, Team

pytestmark = pytest.mark.timeout(START_S + 120)  # whichever comes first waits for vLLM's import


class TestCudaIpc(StreamOrderedSuite):
    connector = "CudaIpcAFDConnector"
    environment = {"AFD_CONTRACT_DEVICE": "cuda:0"}  # noqa: RUF012 - a constant of the suite


class TestP2pNcclOnOneGpu(Processes):
    """Where ends must share a GPU, NCCL is refused before a communicator is made."""

    connector = "P2pNcclAFDConnector"
    environment = {"AFD_CONTRACT_DEVICE": "cuda:0"}  # noqa: RUF012

    def test_ends_on_one_gpu_are_refused_by_uuid(self, team: Team) -> None:
        for error in team.run("refused_on_one_gpu", connector=self.connector):
            assert "on the same GPU" in error
            assert "CudaIpcAFDConnector" in error


@pytest.mark.gpus(2)
class TestCudaIpcBetweenGpus(StreamOrderedSuite):
    """The FFN on one GPU, both lanes on the other."""

    connector = "CudaIpcAFDConnector"
    environment = {"AFD_CONTRACT_DEVICE": "cuda:0,cuda:1,cuda:1"}  # noqa: RUF012


@pytest.mark.gpus(2)
class TestP2pNccl(StreamOrderedSuite):
    """A GPU per end; without a header on the device, a wrong unit of equal size is not recognised."""

    connector = "P2pNcclAFDConnector"
    environment = {"AFD_CONTRACT_DEVICE": "cuda:0,cuda:1", "NCCL_NVLS_ENABLE": "0"}  # noqa: RUF012
    lanes = 1
    after_abort = frozenset({"silent", "refused"})

    test_a_message_of_another_unit_is_an_error_and_never_data = None  # type: ignore[assignment]


@pytest.mark.gpus(2)
class TestP2pNcclWithoutPeerAccess(TestP2pNccl):
    """The same where NCCL may not use peer-to-peer memory and goes through the host's."""

    environment = {**TestP2pNccl.environment, "NCCL_P2P_DISABLE": "1"}  # noqa: RUF012
