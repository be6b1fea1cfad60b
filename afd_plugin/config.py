# SPDX-License-Identifier: Apache-2.0
"""What a user decides about AFD, as two frozen values.

:class:`AFDConfig` is ``additional_config["afd"]``. vLLM hashes it into its compile-cache key, so it holds what shapes
the computation: role, topology, placement, connector, microbatches. :class:`LinkSettings` holds where peers are and how
long to wait; it travels by environment variables, which every child process inherits, and never enters that hash.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TypeVar

from afd_plugin.errors import ConfigRefused, TopologyRefused
from afd_plugin.topology import Topology

CONFIG_KEY = "afd"


class Role(str, Enum):
    """Which half of the model a process serves."""

    ATTENTION = "attention"
    FFN = "ffn"


class GatePlacement(str, Enum):
    """Where router logits are computed. On attention they travel with the hidden states in one message."""

    FFN = "ffn"
    ATTENTION = "attention"


class DensePlacement(str, Enum):
    """Where the MLP of a decoder layer without experts runs."""

    ATTENTION = "attention"
    FFN = "ffn"


class SharedPlacement(str, Enum):
    """Where shared experts run. On attention they run beside the exchange, while the FFN computes the routed ones."""

    FFN = "ffn"
    ATTENTION = "attention"


CONNECTORS = ("TcpAFDConnector", "GlooAFDConnector", "CudaIpcAFDConnector", "P2pNcclAFDConnector")

_E = TypeVar("_E", bound=Enum)


def _choice(kind: type[_E], key: str, value: object) -> _E:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigRefused(f"afd.{key} is {value!r}; expected one of {allowed}.") from None


def _integer(key: str, value: object, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigRefused(f"afd.{key} is {value!r}; expected an integer of at least {minimum}.")
    if value < minimum:
        raise ConfigRefused(f"afd.{key} is {value}; expected at least {minimum}.")
    return value


@dataclass(frozen=True)
class AFDConfig:
    """The validated content of ``additional_config["afd"]``.

    ``microbatches`` is 1 or 2 (two-stage microbatching, which vLLM calls DBO); more stages do not exist in vLLM
    0.28.0's graph wrapper. ``member`` is which lane or which shard this process is where the topology has independent
    lanes or shards; elsewhere vLLM's own ranks say it, and it is 0. Raises :class:`~afd_plugin.errors.ConfigRefused` or
    ``TopologyRefused`` from :meth:`parse`.
    """

    role: Role
    topology: Topology = field(default_factory=Topology)
    gate: GatePlacement = GatePlacement.FFN
    dense: DensePlacement = DensePlacement.ATTENTION
    connector: str = "TcpAFDConnector"
    microbatches: int = 1
    member: int = 0
    shared: SharedPlacement = SharedPlacement.FFN

    @classmethod
    def parse(cls, raw: object) -> AFDConfig:
        """Validate a mapping of plain values; refuse unknown keys, wrong types and unsound topologies."""
        if not isinstance(raw, Mapping):
            raise ConfigRefused(f"additional_config['afd'] is {type(raw).__name__}; expected a mapping.")
        known = {f.name for f in fields(cls)} | {f.name for f in fields(Topology)} - {"topology"}
        known.discard("topology")
        if raw.get("ffn_replicas", 1) != 1:
            raise TopologyRefused(
                "SeparateFFNWorlds",
                "FFN replicas that share no vLLM world are not a topology of one service; start one service for each "
                "and balance requests between them.",
            )
        unknown = sorted(str(key) for key in raw if key not in known | {"ffn_replicas"})
        if unknown:
            raise ConfigRefused(f"Unknown key afd.{unknown[0]}; known keys are {', '.join(sorted(known))}.")
        if "role" not in raw:
            raise ConfigRefused("afd.role is missing; expected 'attention' or 'ffn'.")
        topology = Topology(
            **{
                name: _integer(name, raw[name])
                for name in ("attention_dp", "attention_tp", "ffn_dp", "ffn_tp", "ffn_shards")
                if name in raw
            },
            expert_parallel=cls._boolean("expert_parallel", raw.get("expert_parallel", False)),
            independent_lanes=cls._boolean("independent_lanes", raw.get("independent_lanes", False)),
        )
        topology.validate()
        connector = raw.get("connector", cls.connector)
        if connector not in CONNECTORS:
            raise ConfigRefused(f"afd.connector is {connector!r}; expected one of {', '.join(CONNECTORS)}.")
        microbatches = _integer("microbatches", raw.get("microbatches", 1))
        if microbatches > 2:
            raise ConfigRefused(f"afd.microbatches is {microbatches}; vLLM 0.28.0 runs one or two stages.")
        config = cls(
            role=_choice(Role, "role", raw["role"]),
            topology=topology,
            gate=_choice(GatePlacement, "gate", raw.get("gate", GatePlacement.FFN.value)),
            dense=_choice(DensePlacement, "dense", raw.get("dense", DensePlacement.ATTENTION.value)),
            connector=str(connector),
            microbatches=microbatches,
            member=_integer("member", raw.get("member", 0), minimum=0),
            shared=_choice(SharedPlacement, "shared", raw.get("shared", SharedPlacement.FFN.value)),
        )
        config._check_members()
        return config

    def _check_members(self) -> None:
        members = self.members
        if self.member >= members:
            raise ConfigRefused(
                f"afd.member is {self.member}; the {self.role.value} role of {self.topology.name} has {members} "
                "processes that are counted this way, from 0."
            )
        if self.topology.ffn_shards > 1 and self.dense is DensePlacement.FFN:
            raise TopologyRefused(
                "DenseAmongShards",
                "dense MLPs have no experts to split, so with FFN shards they stay on attention; drop --dense ffn.",
            )
        if self.shared is SharedPlacement.ATTENTION and self.topology.attention_tp > 1:
            raise TopologyRefused(
                "SharedAmongAttentionRanks",
                "vLLM adds up slices of shared experts together with routed ones, which are elsewhere; with "
                "--attention-tp above 1 leave them there, too (--shared ffn).",
            )

    @property
    def members(self) -> int:
        """Processes of this role that share no vLLM world: independent engines, or shards; 1 elsewhere."""
        if self.role is Role.ATTENTION:
            return self.topology.attention_dp if self.topology.independent_lanes else 1
        return self.topology.ffn_shards

    @staticmethod
    def _boolean(key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigRefused(f"afd.{key} is {value!r}; expected true or false.")
        return value

    def to_additional_config(self) -> dict[str, object]:
        """The plain mapping that :meth:`parse` accepts, for ``additional_config["afd"]``."""
        plain: dict[str, object] = {"role": self.role.value}
        plain.update({f.name: getattr(self.topology, f.name) for f in fields(Topology)})
        plain.update(
            gate=self.gate.value,
            dense=self.dense.value,
            connector=self.connector,
            microbatches=self.microbatches,
            member=self.member,
            shared=self.shared.value,
        )
        return plain


@dataclass(frozen=True)
class LinkSettings:
    """Addresses, secret and time bounds of one process; seconds throughout.

    ``listen`` is ``host:port`` that an FFN group leader binds (port 0 lets the system choose, except for the host of
    the rendezvous when peers are started by hand). ``peer`` is the rendezvous address, the ``listen`` of FFN group
    0. ``advertise`` is the host name given to peers when ``listen`` is a wildcard. ``ffn_restart_window_s`` is how long
    attention holds its requests while a failed FFN is started again; 0 fails them at once.
    """

    listen: str = "127.0.0.1:0"
    peer: str = ""
    advertise: str = ""
    token: str = field(default="", repr=False)
    rendezvous_timeout_s: float = 120.0
    ready_timeout_s: float = 1800.0
    exchange_timeout_s: float = 300.0
    failure_timeout_s: float = 10.0
    heartbeat_interval_s: float = 1.0
    drain_timeout_s: float = 30.0
    ffn_restart_window_s: float = 0.0

    @property
    def listen_host(self) -> str:
        """The host of ``listen`` as a socket takes it: no brackets, and a literal for the wildcard ``*``."""
        host = self.listen.rpartition(":")[0].strip("[]")
        return "0.0.0.0" if host == "*" else host or "127.0.0.1"  # noqa: S104

    @property
    def silence_timeout_s(self) -> float:
        """How long a peer may be silent: ``failure_timeout_s`` less what an error takes from here to the client."""
        return 0.75 * self.failure_timeout_s

    @staticmethod
    def variable(name: str) -> str:
        """The environment variable that carries the field ``name``."""
        return "AFD_" + name.removesuffix("_s").upper()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> LinkSettings:
        """Read the settings a launcher put into ``env``; absent variables keep their defaults."""
        values: dict[str, str | float] = {}
        for f in fields(cls):
            raw = env.get(cls.variable(f.name))
            if raw is None:
                continue
            values[f.name] = raw
            if f.name.endswith("_s"):
                values[f.name] = _seconds(cls.variable(f.name), raw, none_is_off=f.default == 0.0)
        return cls(**values)  # type: ignore[arg-type]

    def beside(self) -> LinkSettings:
        """Settings of a further FFN group on the host of the rendezvous: its own port there, and ``listen`` to dial."""
        host, _, port = self.listen.rpartition(":")
        reachable = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104
        return replace(self, listen=f"{host}:0", peer=f"{reachable}:{port}")

    def to_env(self) -> dict[str, str]:
        """The environment variables that :meth:`from_env` reads back."""
        return {self.variable(f.name): str(getattr(self, f.name)) for f in fields(self)}


def _seconds(variable: str, raw: str, none_is_off: bool) -> float:
    try:
        value = float(raw)
    except ValueError:
        raise ConfigRefused(f"{variable} is {raw!r}; expected a number of seconds.") from None
    if not 0 < value < float("inf") and not (none_is_off and value == 0):
        raise ConfigRefused(f"{variable} is {raw!r}; expected a positive, finite number of seconds.")
    return value
