# SPDX-License-Identifier: Apache-2.0
"""Prints as JSON what a vLLM process looks like once its plugins are loaded; run by `test_isolation.py`."""

import json
import multiprocessing
import os
import sys
from pathlib import Path


def main() -> None:
    """`python -m tests.e2e.isolation_probe MODEL OUTPUT`."""
    model, output = sys.argv[1:]
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry, op_registry_oot
    from vllm.model_executor.model_loader import get_model_loader  # noqa: F401 - fills the table below
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: F401

    loaders = sys.modules["vllm.model_executor.model_loader"]._LOAD_FORMAT_TO_MODEL_LOADER
    config = EngineArgs(model=model, enforce_eager=True).create_engine_config()
    seen = {
        "architectures": sorted(ModelRegistry.get_supported_archs()),
        "out_of_tree": sorted(op_registry_oot),
        "operators": sorted(op_registry),
        "load_formats": sorted(loaders),
        "environment": {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"},
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "config_hash": config.compute_hash(),
        "modules": sorted(sys.modules),
    }
    Path(output).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
