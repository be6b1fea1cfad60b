# SPDX-License-Identifier: Apache-2.0
"""Command lines, servers, executors, and the native side of comparisons."""

from __future__ import annotations

from afd_plugin.seams import evidence
from afd_plugin.seams.schema import Seam, SeamKind, Surface

SEAMS: tuple[Seam, ...] = (
    Seam(
        id="general-plugins",
        symbol="vllm.plugins:DEFAULT_PLUGINS_GROUP",
        kind=SeamKind.ENTRY_POINT,
        signature="DEFAULT_PLUGINS_GROUP",
        sha256="b5706e4f42d0a68ffd946e68a9401eaa10827ff68d2f41c4638b71a0ef9597a2",
        invariant=(
            "Entry points of this group are called in every vLLM process; exceptions they raise are "
            "swallowed."
        ),
        plan="stays: a documented extension point",
        used_by=("afd_plugin.cli.preflight",),
        afd_tests=evidence.ISOLATION,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="native-api-server",
        symbol="vllm.entrypoints.openai.api_server:",
        kind=SeamKind.ENTRY_POINT,
        signature="",
        sha256="1ea99a5cc6337bf5681aeb5983cd903b70d3a006cf499f4c7b0112f426bf6033",
        invariant="Runnable as a module with the arguments of `vllm serve`.",
        plan="stays: the native way to serve without the console script",
        used_by=("afd_plugin.demo.service",),
        afd_tests=evidence.NATIVE,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="executor-class",
        symbol="vllm.v1.executor.abstract:Executor.get_class",
        kind=SeamKind.CALL,
        signature="@staticmethod def get_class(vllm_config: VllmConfig) -> type['Executor']",
        sha256="cde5ba583f244836d13fa1a67f9e4381c929b927a8212d21e42783417be019b4",
        invariant="Maps the configured backend to an executor class without starting anything.",
        plan="propose upstream: a host for workers without an engine core",
        used_by=("afd_plugin.cli.ffn_main",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="multiproc-executor",
        symbol="vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        kind=SeamKind.CALL,
        signature="class MultiprocExecutor(Executor)",
        sha256="3efc3c104629c29efc37a6d468013ecfd8db32c343665531523518a01c020e63",
        invariant=(
            "Its constructor starts and loads the workers; it watches their death; RPCs with "
            "non_block return a future."
        ),
        plan="propose upstream: a host for workers without an engine core",
        used_by=("afd_plugin.cli.ffn_main",),
        afd_tests=evidence.WORKER,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="engine-client",
        symbol="vllm.entrypoints.openai.api_server:build_async_engine_client",
        kind=SeamKind.CALL,
        signature=(
            "@asynccontextmanager async def build_async_engine_client(args: Namespace, *, "
            "usage_context: UsageContext=UsageContext.OPENAI_API_SERVER, client_config: dict[str, "
            "Any] | None=None) -> AsyncIterator[EngineClient]"
        ),
        sha256="cae31e90e2a5d864f2bc11291f2de5a80c9b2bea8059a41f58f77efc45114026",
        invariant=(
            "Yields a client whose engine has loaded; leaving the context ends the engine's processes."
        ),
        plan="propose upstream: a server entry that takes a finished configuration",
        used_by=("afd_plugin.cli.attention_main",),
        afd_tests=evidence.SERVICE,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="serve-http",
        symbol="vllm.entrypoints.openai.api_server:build_and_serve",
        kind=SeamKind.CALL,
        signature=(
            "async def build_and_serve(engine_client: EngineClient, listen_address: str, sock: "
            "socket.socket, args: Namespace, **uvicorn_kwargs) -> asyncio.Task"
        ),
        sha256="256900703402be3f0f2746da9f2b3597394f789d7aa20f0ac2d490413d753f7f",
        invariant="Serves until SIGTERM and returns a task that ends with the server.",
        plan="propose upstream: a server entry that takes a finished configuration",
        used_by=("afd_plugin.cli.attention_main",),
        afd_tests=evidence.SERVICE,
        native_tests=evidence.ISOLATION,
    ),
    Seam(
        id="http-socket",
        symbol="vllm.entrypoints.openai.api_server:setup_server",
        kind=SeamKind.CALL,
        signature="@instrument(span_name='API server setup') def setup_server(args, *, reuse_port: bool)",
        sha256="d5f95cb73330e854319f93096b089d39384f4e92825f8a4c610a1e2cb1139403",
        invariant="Binds the socket before the engine starts and checks the arguments.",
        plan="propose upstream: a server entry that takes a finished configuration",
        used_by=("afd_plugin.cli.attention_main",),
        afd_tests=evidence.SERVICE,
        native_tests=evidence.ISOLATION,
    ),
)

SURFACES: tuple[Surface, ...] = (
    Surface(
        id="engine-args-class",
        owner="vllm.engine.arg_utils:",
        names={
            "AsyncEngineArgs": "6b4808452a90d535",
        },
        invariant="The class of the server's engine arguments.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="engine-args",
        owner="vllm.engine.arg_utils:EngineArgs",
        names={
            "create_engine_config": "f83025fc105d5fff",
            "from_cli_args": "68341393d9a2c8b4",
        },
        invariant="Engine arguments from a parsed command line, and the complete configuration from them.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="engine-client-state",
        owner="vllm.engine.protocol:EngineClient",
        names={
            "errored": "53b0c9c48d461257",
        },
        invariant="Whether the engine has died.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="llm-class",
        owner="vllm.entrypoints.llm:",
        names={
            "LLM": "8baaaca4a99cabeb",
        },
        invariant="The offline engine, which the native side of a comparison runs.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="llm",
        owner="vllm.entrypoints.llm:LLM",
        names={
            "generate": "a9fef78c7d9802ae",
        },
        invariant="Generates for a batch of prompts and returns in their order.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="llm-engine",
        owner="vllm.entrypoints.offline_utils:OfflineInferenceMixin",
        names={
            "llm_engine": "668ee18635608acd",
        },
        invariant="The engine under an offline model.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="serve-arguments",
        owner="vllm.entrypoints.openai.cli_args:",
        names={
            "make_arg_parser": "c9ec967c6158730b",
            "validate_parsed_serve_args": "ad0e9dd86a04ab03",
        },
        invariant="The arguments of `vllm serve` and their checks.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="serve-environment",
        owner="vllm.entrypoints.serve.utils.api_utils:",
        names={
            "cli_env_setup": "88bbcb5efa7e62da",
        },
        invariant="The environment that vLLM's own command line sets up.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="logprob",
        owner="vllm.logprobs:Logprob",
        names={
            "logprob": "dccf22e1b236cfad",
        },
        invariant="The logarithm of one candidate's probability.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="outputs",
        owner="vllm.outputs:",
        names={
            "RequestOutput": "41382408e712ee6a",
        },
        invariant="The class of a finished request.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="completion-output",
        owner="vllm.outputs:CompletionOutput",
        names={
            "logprobs": "c05eee8f69e7eb59",
            "token_ids": "521572b0e8f9418c",
        },
        invariant="Token ids and candidates of one completion.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="request-output",
        owner="vllm.outputs:RequestOutput",
        names={
            "outputs": "6b0febeeeb40809f",
            "prompt_token_ids": "24b5531f4434dcfa",
        },
        invariant="The prompt's token ids and the completions of one request.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="platform-kind",
        owner="vllm.platforms.interface:Platform",
        names={
            "device_type": "e7b1587171950df6",
            "is_cpu": "ee8a600d8aa3f85a",
        },
        invariant="What kind of device the platform drives.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="platform",
        owner="vllm.platforms:",
        names={
            "current_platform": "8f14651258995ddd",
        },
        invariant="The platform of this process.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="sampling-params",
        owner="vllm.sampling_params:",
        names={
            "SamplingParams": "aa3f9bdb4ee60d24",
        },
        invariant="How the native side of a comparison samples.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="usage-context-class",
        owner="vllm.usage.usage_lib:",
        names={
            "UsageContext": "aced6f6c608d35e9",
        },
        invariant="Where an engine is used from.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="usage-context",
        owner="vllm.usage.usage_lib:UsageContext",
        names={
            "OPENAI_API_SERVER": "0296cf697c56e202",
        },
        invariant="Decides vLLM's default batch sizes; the value of the native server.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="argument-parser-class",
        owner="vllm.utils.argparse_utils:",
        names={
            "FlexibleArgumentParser": "f68801fe85f5b26e",
        },
        invariant="vLLM's parser, which also reads configuration files.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="argument-parser",
        owner="vllm.utils.argparse_utils:FlexibleArgumentParser",
        names={
            "parse_args": "97ad9b9d074e6737",
        },
        invariant="Parses as the native server does.",
        afd_tests=evidence.SERVICE,
    ),
    Surface(
        id="engine-core-client",
        owner="vllm.v1.engine.core_client:EngineCoreClient",
        names={
            "shutdown": "792bd9b49869dbea",
        },
        invariant="Ends the engine core's process.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="llm-engine-core",
        owner="vllm.v1.engine.llm_engine:LLMEngine",
        names={
            "engine_core": "ab9d7b67f486e314",
        },
        invariant="The client of the engine core.",
        afd_tests=evidence.NATIVE,
    ),
    Surface(
        id="executor-base",
        owner="vllm.v1.executor.abstract:",
        names={
            "Executor": "a870242926a8110b",
        },
        invariant="The base of executors.",
        afd_tests=evidence.WORKER,
    ),
    Surface(
        id="multiproc-executor-calls",
        owner="vllm.v1.executor.multiproc_executor:MultiprocExecutor",
        names={
            "collective_rpc": "f4b2dc7c21c19f64",
            "shutdown": "6f7e182b1fddd539",
            "workers": "af5be6e113d645e1",
        },
        invariant="RPCs, the workers' processes, and the bounded end of both.",
        afd_tests=evidence.WORKER,
    ),
)
