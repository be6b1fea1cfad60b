# SPDX-License-Identifier: Apache-2.0
"""One validated value for everything a user decided on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from afd_plugin.cli.flags import refuse_arguments
from afd_plugin.config import AFDConfig, LinkSettings, Role
from afd_plugin.errors import ConfigRefused
from afd_plugin.supervisor.spec import TimeLimits

DEFAULT_RENDEZVOUS = "127.0.0.1:29700"
"""Where `afd ffn` listens and `afd attention` dials unless told otherwise."""

DEFAULT_STATUS = "127.0.0.1:0"
"""Where the FFN answers /health, /ready and /metrics: a free port that the launcher prints."""


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch.

    Attributes:
        model: Path or name of the model, as vLLM takes it.
        afd: The AFD configuration; its role is set per child.
        link: Addresses, token and time bounds.
        automatic_connector: Whether the data plane may be chosen by the devices found.
        device: ``cpu`` or ``cuda``.
        host: Where the HTTP endpoint listens.
        port: Its port; 0 lets the system choose.
        vllm: vLLM's own options for both roles, untouched.
        attention_vllm: Further ones for the attention role only.
        ffn_vllm: Further ones for the FFN role only.
        startup_timeout: Seconds until everything must be ready.
        debug: Whether errors come with a traceback.
        status: ``host:port`` of the FFN's status endpoint; port 0 lets the system choose.
    """

    model: str
    afd: AFDConfig
    link: LinkSettings
    device: str
    host: str = "127.0.0.1"
    port: int = 8000
    vllm: tuple[str, ...] = ()
    automatic_connector: bool = True
    attention_vllm: tuple[str, ...] = ()
    ffn_vllm: tuple[str, ...] = ()
    startup_timeout: float = 1800.0
    debug: bool = False
    status: str = DEFAULT_STATUS

    def arguments(self, role: Role) -> tuple[str, ...]:
        """vLLM's options for ``role``."""
        return self.vllm + (self.attention_vllm if role is Role.ATTENTION else self.ffn_vllm)

    def with_role_arguments(self, attention: tuple[str, ...], ffn: tuple[str, ...]) -> LaunchOptions:
        """These options with vLLM options for single roles."""
        return replace(self, attention_vllm=attention, ffn_vllm=ffn)

    def for_role(self, role: Role) -> AFDConfig:
        """The AFD configuration of ``role``."""
        return replace(self.afd, role=role)

    def limits(self) -> TimeLimits:
        """The supervisor's bounds that follow from the link's."""
        return TimeLimits(
            startup=self.startup_timeout,
            failure=self.link.failure_timeout_s,
            drain=3 * self.link.drain_timeout_s,
        )


def check_model_argument(model: str) -> None:
    """Refuse an option where the model belongs: options of vLLM's own go after MODEL.

    Otherwise the value of an option that only vLLM knows would be taken for the model.
    """
    if not model or model.startswith("-"):
        raise ConfigRefused(
            f"The model comes first and {model!r} is no model; write `afd COMMAND MODEL [options]`, "
            "with vLLM's own options after MODEL."
        )


def check_passed_through(arguments: Sequence[str]) -> tuple[str, ...]:
    """``arguments`` for vLLM, refused by name where AFD cannot honour them."""
    refuse_arguments(arguments)
    return tuple(arguments)


def check_bounds(link: LinkSettings, startup_timeout: float) -> None:
    """Refuse a bound that is none."""
    for option, seconds in (
        ("--rendezvous-timeout", link.rendezvous_timeout_s),
        ("--ready-timeout", link.ready_timeout_s),
        ("--failure-timeout", link.failure_timeout_s),
        ("--drain-timeout", link.drain_timeout_s),
        ("--startup-timeout", startup_timeout),
    ):
        if not 0 < seconds < float("inf"):
            raise ConfigRefused(f"{option} is {seconds}; expected a positive, finite number of seconds.")
    if not 0 <= link.ffn_restart_window_s < float("inf"):
        raise ConfigRefused(
            f"--ffn-restart-window is {link.ffn_restart_window_s}; expected 0 or a finite number of seconds."
        )


def status_address(value: str) -> str:
    """``value`` if it is HOST:PORT."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigRefused(f"--status is {value!r}; expected HOST:PORT.")
    return value
