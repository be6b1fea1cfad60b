# SPDX-License-Identifier: Apache-2.0
"""Process groups and communicators that carry exchanges."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, Surface

SEAMS: tuple[Seam, ...] = ()

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="pynccl",
        owner="vllm.distributed.device_communicators.pynccl:",
        names={
            "PyNcclCommunicator": "d8a7f046da7cf437",
        },
        invariant="Point-to-point NCCL over a group of our own.",
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="pynccl-calls",
        owner="vllm.distributed.device_communicators.pynccl:PyNcclCommunicator",
        names={
            "available": "83244f8be0650d1b",
            "destroy": "15fe7c0550b44080",
            "group_end": "ce931c91a28aae67",
            "group_start": "d579c7344ccb1dc9",
            "recv": "b0cd90cf356b4ed6",
            "send": "6dd7ad4e6ba83ae3",
        },
        invariant=(
            "Sends and receives on the stream given, groups them, and destroys the communicator "
            "within a bound."
        ),
        afd_tests=evidence.GPU,
    ),
    Surface(
        id="stateless-groups",
        owner="vllm.distributed.utils:",
        names={
            "StatelessProcessGroup": "f9ec0912c8a732c4",
            "stateless_init_torch_distributed_process_group": "7009f64f67d59d9d",
        },
        invariant="Process groups that leave torch's default group alone.",
        afd_tests=evidence.CONNECTORS,
    ),
)
