# SPDX-License-Identifier: Apache-2.0
"""The `afd` command: options and their help texts; the work is in the modules beside it."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import afd_plugin
from afd_plugin.cli.layout import Engine, Engines, FfnShards, Shared, afd_config
from afd_plugin.cli.options import (
    DEFAULT_RENDEZVOUS,
    DEFAULT_STATUS,
    LaunchOptions,
    check_bounds,
    check_model_argument,
    check_passed_through,
    status_address,
)
from afd_plugin.cli.parameters import (
    AttentionDP,
    AttentionTP,
    Connector,
    Debug,
    Dense,
    Device,
    Drain,
    Failure,
    FfnDP,
    FfnEP,
    FfnRestart,
    FfnTP,
    Gate,
    Host,
    Microbatches,
    Model,
    Port,
    ReadyTimeout,
    Rendezvous,
    Startup,
    Status,
    TokenFile,
)
from afd_plugin.config import AFDConfig, DensePlacement, GatePlacement, LinkSettings, Role, SharedPlacement
from afd_plugin.errors import AFDError, ConfigRefused

_DEFAULTS = LinkSettings()
# `-h` is none of click's short options here: it would be found within vLLM's own, as in `-cc.cudagraph_mode=...`
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
_VLLM_HELP = (
    "Every other option is one of vLLM's own (`vllm serve`) and is passed on; put it after MODEL. "
    "What AFD cannot honour is refused by name."
)

app = typer.Typer(
    name="afd",
    help="Serve one MoE model with vLLM as an attention service and an FFN service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(value: bool) -> None:
    if value:
        from afd_plugin.cli.preflight import vllm_version

        typer.echo(f"afd-plugin {afd_plugin.__version__} (vLLM {vllm_version() or 'not installed'})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Serve one MoE model with vLLM as an attention service and an FFN service."""


@app.command(context_settings=_PASS_THROUGH, epilog=_VLLM_HELP)
def serve(
    context: typer.Context,
    model: Model,
    attention_dp: AttentionDP = 1,
    attention_tp: AttentionTP = 1,
    ffn_dp: FfnDP = 1,
    ffn_tp: FfnTP = 1,
    ffn_ep: FfnEP = False,
    ffn_shards: FfnShards = 1,
    gate: Gate = GatePlacement.FFN,
    dense: Dense = DensePlacement.ATTENTION,
    shared: Shared = SharedPlacement.FFN,
    connector: Connector = "auto",
    microbatches: Microbatches = 1,
    device: Device = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    attention_args: Annotated[
        str, typer.Option(help="vLLM options for the attention role only, quoted.")
    ] = "",
    ffn_args: Annotated[str, typer.Option(help="vLLM options for the FFN role only, quoted.")] = "",
    status: Status = DEFAULT_STATUS,
    rendezvous_timeout: Rendezvous = _DEFAULTS.rendezvous_timeout_s,
    ready_timeout: ReadyTimeout = _DEFAULTS.ready_timeout_s,
    failure_timeout: Failure = _DEFAULTS.failure_timeout_s,
    drain_timeout: Drain = _DEFAULTS.drain_timeout_s,
    ffn_restart_window: FfnRestart = _DEFAULTS.ffn_restart_window_s,
    startup_timeout: Startup = 1800.0,
    debug: Debug = False,
) -> None:
    """Run both roles on this host behind one OpenAI endpoint: by default one attention and one FFN rank."""
    from afd_plugin.cli.run import run_serve

    afd = afd_config(
        Role.ATTENTION,
        (attention_dp, attention_tp, ffn_dp, ffn_tp, ffn_ep),
        (gate, dense, shared, connector, microbatches),
        ffn_shards,
    )
    link = LinkSettings(
        token=os.environ.get("AFD_TOKEN") or secrets.token_hex(16),
        rendezvous_timeout_s=rendezvous_timeout,
        ready_timeout_s=ready_timeout,
        failure_timeout_s=failure_timeout,
        drain_timeout_s=drain_timeout,
        ffn_restart_window_s=ffn_restart_window,
    )
    options = _launch_options(
        context, model, afd, link, device, connector, host, port, startup_timeout, debug
    )
    options = replace(options, status=status_address(status)).with_role_arguments(
        check_passed_through(shlex.split(attention_args)), check_passed_through(shlex.split(ffn_args))
    )
    raise typer.Exit(run_serve(options))


@app.command(context_settings=_PASS_THROUGH, epilog=_VLLM_HELP)
def attention(
    context: typer.Context,
    model: Model,
    peer: Annotated[
        str, typer.Option("--peer", help="HOST:PORT where `afd ffn` listens.")
    ] = DEFAULT_RENDEZVOUS,
    attention_dp: AttentionDP = 1,
    attention_tp: AttentionTP = 1,
    ffn_dp: FfnDP = 1,
    ffn_tp: FfnTP = 1,
    ffn_ep: FfnEP = False,
    ffn_shards: FfnShards = 1,
    engine: Engine = "",
    gate: Gate = GatePlacement.FFN,
    dense: Dense = DensePlacement.ATTENTION,
    shared: Shared = SharedPlacement.FFN,
    connector: Connector = "auto",
    microbatches: Microbatches = 1,
    device: Device = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: TokenFile = None,
    rendezvous_timeout: Rendezvous = _DEFAULTS.rendezvous_timeout_s,
    ready_timeout: ReadyTimeout = _DEFAULTS.ready_timeout_s,
    failure_timeout: Failure = _DEFAULTS.failure_timeout_s,
    drain_timeout: Drain = _DEFAULTS.drain_timeout_s,
    ffn_restart_window: FfnRestart = _DEFAULTS.ffn_restart_window_s,
    startup_timeout: Startup = 1800.0,
    debug: Debug = False,
) -> None:
    """Run the attention role: HTTP, scheduler, KV cache, attention. Start `afd ffn` with the same sizes
    too.
    """
    from afd_plugin.cli.run import run_attention

    afd = afd_config(
        Role.ATTENTION,
        (attention_dp, attention_tp, ffn_dp, ffn_tp, ffn_ep),
        (gate, dense, shared, connector, microbatches),
        ffn_shards,
        engine,
    )
    link = LinkSettings(
        peer=peer,
        token=_token(token_file),
        rendezvous_timeout_s=rendezvous_timeout,
        ready_timeout_s=ready_timeout,
        failure_timeout_s=failure_timeout,
        drain_timeout_s=drain_timeout,
        ffn_restart_window_s=ffn_restart_window,
    )
    options = _launch_options(
        context, model, afd, link, device, connector, host, port, startup_timeout, debug
    )
    raise typer.Exit(run_attention(options))


@app.command(context_settings=_PASS_THROUGH, epilog=_VLLM_HELP)
def ffn(
    context: typer.Context,
    model: Model,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT of the rendezvous; `afd attention --peer` names it.")
    ] = DEFAULT_RENDEZVOUS,
    advertise: Annotated[
        str, typer.Option("--advertise", help="Host name given to peers; needed when --listen is a wildcard.")
    ] = "",
    attention_dp: AttentionDP = 1,
    attention_tp: AttentionTP = 1,
    ffn_dp: FfnDP = 1,
    ffn_tp: FfnTP = 1,
    ffn_ep: FfnEP = False,
    ffn_shards: FfnShards = 1,
    engines: Engines = 1,
    gate: Gate = GatePlacement.FFN,
    dense: Dense = DensePlacement.ATTENTION,
    shared: Shared = SharedPlacement.FFN,
    connector: Connector = "auto",
    microbatches: Microbatches = 1,
    device: Device = "auto",
    token_file: TokenFile = None,
    status: Status = DEFAULT_STATUS,
    rendezvous_timeout: Rendezvous = _DEFAULTS.rendezvous_timeout_s,
    ready_timeout: ReadyTimeout = _DEFAULTS.ready_timeout_s,
    failure_timeout: Failure = _DEFAULTS.failure_timeout_s,
    drain_timeout: Drain = _DEFAULTS.drain_timeout_s,
    ffn_restart_window: FfnRestart = _DEFAULTS.ffn_restart_window_s,
    startup_timeout: Startup = 1800.0,
    debug: Debug = False,
) -> None:
    """Run the FFN role: the experts. It ends in good order when the attention role shuts the service down."""
    from afd_plugin.cli.run import run_ffn

    afd = afd_config(
        Role.FFN,
        (attention_dp, attention_tp, ffn_dp, ffn_tp, ffn_ep),
        (gate, dense, shared, connector, microbatches),
        ffn_shards,
        engines,
    )
    link = LinkSettings(
        listen=listen,
        advertise=advertise,
        token=_token(token_file),
        rendezvous_timeout_s=rendezvous_timeout,
        ready_timeout_s=ready_timeout,
        failure_timeout_s=failure_timeout,
        drain_timeout_s=drain_timeout,
        ffn_restart_window_s=ffn_restart_window,
    )
    options = _launch_options(context, model, afd, link, device, connector, "", 0, startup_timeout, debug)
    raise typer.Exit(run_ffn(replace(options, status=status_address(status))))


@app.command()
def status(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            help="Endpoints to ask (attention's, the FFN's); by default the services of this host."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show both roles at a glance: phase, health, steps, time per exchange, peers. Exit code 1 if one is not well."""
    from afd_plugin.cli.status import run_status

    raise typer.Exit(run_status(tuple(urls or ()), as_json))


@app.command()
def check(
    model: Annotated[str | None, typer.Argument(help="Folder or name of a model to look at, too.")] = None,
    attention_dp: AttentionDP = 1,
    attention_tp: AttentionTP = 1,
    ffn_dp: FfnDP = 1,
    ffn_tp: FfnTP = 1,
    ffn_ep: FfnEP = False,
    device: Device = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT of the rendezvous.")
    ] = DEFAULT_RENDEZVOUS,
) -> None:
    """Look at this host before serving: versions, registration, ports, memory, GPUs, the model's
    architecture.
    """
    from afd_plugin.cli.preflight import failed, run_checks, table
    from afd_plugin.topology import Topology

    topology = Topology(attention_dp, attention_tp, ffn_dp, ffn_tp, ffn_ep)
    listen_host, _, listen_port = listen.rpartition(":")
    if not listen_port.isdigit():
        raise ConfigRefused(f"--listen is {listen!r}; expected HOST:PORT.")
    ports = [(host, port), (listen_host.strip("[]"), int(listen_port))]
    checks = run_checks(model, _device(device), topology, ports, os.environ)
    typer.echo(table(checks))
    raise typer.Exit(2 if failed(checks) else 0)


@app.command()
def demo(
    names: Annotated[
        list[str] | None, typer.Argument(help="Checkpoints to serve; by default all of them.")
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="File for the report.")] = Path("demo-report.json"),
) -> None:
    """Serve small models natively and through AFD, and show that the answers are the same bits."""
    from afd_plugin.demo.recipes import RECIPES
    from afd_plugin.demo.runner import run_demo
    from afd_plugin.supervisor.signals import leave_by_exit

    unknown = [name for name in names or () if name not in RECIPES]
    if unknown:
        raise ConfigRefused(f"There is no checkpoint {unknown[0]!r}; known are {', '.join(RECIPES)}.")
    leave_by_exit()
    raise typer.Exit(run_demo(names or tuple(RECIPES), report))


def _launch_options(
    context: typer.Context,
    model: str,
    afd: AFDConfig,
    link: LinkSettings,
    device: str,
    connector: str,
    host: str,
    port: int,
    startup_timeout: float,
    debug: bool,
) -> LaunchOptions:
    check_model_argument(model)
    check_bounds(link, startup_timeout)
    if not 0 <= port < 65536:
        raise ConfigRefused(f"--port is {port}; expected 0 to 65535.")
    return LaunchOptions(
        model=model,
        afd=afd,
        automatic_connector=connector == "auto",
        link=link,
        device=_device(device),
        host=host,
        port=port,
        vllm=check_passed_through(context.args),
        startup_timeout=startup_timeout,
        debug=debug,
    )


def _device(name: str) -> str:
    from afd_plugin.cli.devices import detect_device

    if name == "auto":
        return detect_device(os.environ)
    if name not in ("cpu", "cuda"):
        raise ConfigRefused(f"--device is {name!r}; expected auto, cpu or cuda.")
    return name


def _token(path: Path | None) -> str:
    if path is None:
        return os.environ.get("AFD_TOKEN", "")
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigRefused(f"--token-file {path} cannot be read ({error.strerror}).") from None
    if not token:
        raise ConfigRefused(f"--token-file {path} is empty; write a secret into it.")
    return token


def main() -> None:
    """Entry point of the console script: one sentence on stderr and an exit code for every refusal."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line ``arguments`` and return its exit code."""
    try:
        app(["--help" if word == "-h" else word for word in arguments], prog_name="afd")
    except AFDError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stderr.write(f"afd: {error.line()}\n")
        return error.exit_code
    except SystemExit as ended:  # how typer ends: 0, a command's own code, or 2 for a usage error it has told
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
