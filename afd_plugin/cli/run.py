# SPDX-License-Identifier: Apache-2.0
"""Runs what the commands describe: reserves ports, shares devices, supervises, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from afd_plugin.cli.devices import DeviceShare, check_compiler, list_gpus, share_devices, visible_gpus
from afd_plugin.cli.launch import attention_child, ffn_children, role_environment
from afd_plugin.cli.options import LaunchOptions
from afd_plugin.connectors.extension import check_connector
from afd_plugin.control.address import Address
from afd_plugin.errors import AFDError, ConfigRefused, PeerFailure
from afd_plugin.supervisor.ports import PortReservation, check_port_free, join_address
from afd_plugin.supervisor.sink import LogSink
from afd_plugin.supervisor.spec import ChildSpec, Outcome
from afd_plugin.supervisor.supervisor import Details, Supervisor
from afd_plugin.v1.refusals import check_environment

SHARED_CONNECTOR = "CudaIpcAFDConnector"
APART_CONNECTOR = "P2pNcclAFDConnector"

_OnReady = Callable[[Mapping[str, Details]], str]


def run_serve(options: LaunchOptions) -> int:
    """Both roles on this host; returns the exit code, which never lays the blame on another launcher's role."""
    _check_host(options)
    _check_http_port(options)
    share = _share(options)
    options = _with_connector(options, share.shared if share else False)
    if share is not None and options.afd.connector == SHARED_CONNECTOR:
        share = share.seeing_each_other()
    topology = options.afd.topology
    workers = topology.attention_ranks + topology.ffn_ranks
    with contextlib.ExitStack() as stack:
        rendezvous = stack.enter_context(PortReservation())
        master = stack.enter_context(PortReservation())
        address = join_address(rendezvous.host, rendezvous.port)
        options = replace(options, link=replace(options.link, listen=address))
        ffn_env = role_environment(
            options, os.environ, options.link, _cores(), workers, share.ffn if share else None
        )
        attention_link = replace(options.link, listen="127.0.0.1:0", peer=address)
        attention_env = role_environment(
            options, os.environ, attention_link, _cores(), workers, share.attention if share else None
        )
        children = [
            *ffn_children(options, ffn_env, share, master.port),
            attention_child(options, attention_env, share),
        ]
        code = _supervise(options, children, lambda ready: _serving(options, ready))
    return AFDError.exit_code if code == PeerFailure.exit_code else code


def run_attention(options: LaunchOptions) -> int:
    """The attention role alone; returns the exit code."""
    _check_host(options)
    _check_http_port(options)
    options = _with_connector(options, shared=False)
    workers = options.afd.topology.attention_ranks
    env = role_environment(options, os.environ, options.link, _cores(), workers)
    return _supervise(options, [attention_child(options, env, None)], lambda ready: _serving(options, ready))


def run_ffn(options: LaunchOptions) -> int:
    """The FFN role alone; returns the exit code."""
    _check_host(options)
    listen = Address.parse(options.link.listen, "--listen")
    if not listen.port:
        raise ConfigRefused("--listen has port 0, but the attention role must be told a port; name one.")
    check_port_free(listen.host, listen.port)
    options = _with_connector(options, shared=False)
    topology = options.afd.topology
    apart = options.device != "cpu" and topology.ffn_shards > 1
    visible = ",".join(visible_gpus(list_gpus(), os.environ)) if apart else None
    env = role_environment(options, os.environ, options.link, _cores(), topology.ffn_ranks, visible)
    with PortReservation() as master:
        children = ffn_children(options, env, None, master.port)
        address = options.link.listen
        return _supervise(
            options, children, lambda ready: f"the FFN serves; attention reaches it at {address}"
        )


def _supervise(options: LaunchOptions, children: Sequence[ChildSpec], ready: _OnReady) -> int:
    sink = LogSink()

    def on_ready(details: Mapping[str, Details]) -> None:
        sink.line("afd", f"ready: {ready(details)}")

    try:
        outcome = Supervisor(children, options.limits(), sink, on_ready).run()
    finally:
        sink.close()
    _say_how_it_ended(outcome)
    return outcome.exit_code


def _serving(options: LaunchOptions, ready: Mapping[str, Details]) -> str:
    url = ready["attention-0"].get("url", "")
    return f"{url} ({options.model}, {options.afd.topology.name})"


def _say_how_it_ended(outcome: Outcome) -> None:
    if outcome.cause is not None:
        cause = outcome.cause
        first, *rest = cause.message.splitlines() or [""]
        summary = f"afd: {cause.child}: {cause.error}: {first}"
        # The last line always names the cause; what belongs to it stands before.
        sys.stderr.write("\n".join([summary, *rest, summary] if rest else [summary]) + "\n")


def _check_http_port(options: LaunchOptions) -> None:
    if options.port:
        check_port_free(options.host, options.port)


def _share(options: LaunchOptions) -> DeviceShare | None:
    if options.device == "cpu":
        return None
    names = visible_gpus(list_gpus(), os.environ)
    if not names:
        raise ConfigRefused("No GPU is visible on this host; install vLLM's CPU build or pass --device cpu.")
    return share_devices(names, options.afd.topology)


def _with_connector(options: LaunchOptions, shared: bool) -> LaunchOptions:
    """Choose the data plane where the user left it to us; refuse one that cannot be had here."""
    if options.device == "cpu":
        return options
    if not options.automatic_connector:
        check_connector(options.afd.connector)
        return options
    name = SHARED_CONNECTOR if shared else APART_CONNECTOR
    check_connector(name)
    return replace(options, afd=replace(options.afd, connector=name))


def _check_host(options: LaunchOptions) -> None:
    """What every role's launcher refuses before it starts anything."""
    check_environment(os.environ)
    check_compiler(options.device, os.environ)
    _check_restart(options)


def _check_restart(options: LaunchOptions) -> None:
    if not options.link.ffn_restart_window_s:
        return
    if options.device != "cpu" or options.afd.microbatches > 1:
        raise ConfigRefused(
            "--ffn-restart-window holds the steps of the CPU lane in one stage; on GPUs, and with microbatches, a step "
            "that lost its FFN cannot go on. Drop the option."
        )
    if not options.afd.topology.one_ffn:
        raise ConfigRefused(
            "--ffn-restart-window holds steps that all lanes and the one FFN group run together; with several groups, "
            "FFN shards or independent engines they do not. Drop the option."
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0))
