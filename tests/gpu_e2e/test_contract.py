# SPDX-License-Identifier: Apache-2.0
"""The connector contract on a GPU; `nox -s gpu_e2e`. Several ends share one GPU through CUDA IPC."""

import torch

from tests.unit.connectors.contract import Processes, StreamOrderedSuite
from tests.unit.connectors.team import Team

assert torch.cuda.is_available(), (
    "this folder needs a GPU; the CPU's part of the contract is in tests/unit/connectors"
)


class TestCudaIpc(StreamOrderedSuite):
    connector = "CudaIpcAFDConnector"
    environment = {"AFD_CONTRACT_DEVICE": "cuda:0"}  # noqa: RUF012 - a constant of the suite


if torch.cuda.device_count() >= 3:

    class TestP2pNccl(StreamOrderedSuite):
        """Needs a GPU per end; without a header on the device, a wrong unit of equal size is not recognised."""

        connector = "P2pNcclAFDConnector"
        environment = {"AFD_CONTRACT_DEVICE": "cuda"}  # noqa: RUF012

        test_a_message_of_another_unit_is_an_error_and_never_data = None  # type: ignore[assignment]
else:

    class TestP2pNcclOnOneGpu(Processes):
        """Where ends must share a GPU, NCCL is refused before a communicator is made."""

        connector = "P2pNcclAFDConnector"
        environment = {"AFD_CONTRACT_DEVICE": "cuda:0"}  # noqa: RUF012

        def test_ends_on_one_gpu_are_refused_by_uuid(self, team: Team) -> None:
            for error in team.run("refused_on_one_gpu", connector=self.connector):
                assert "on the same GPU" in error
                assert "CudaIpcAFDConnector" in error
