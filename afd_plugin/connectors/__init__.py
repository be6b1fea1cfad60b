# SPDX-License-Identifier: Apache-2.0
"""The data plane: connectors move packed messages of rows between lanes and FFN groups.

A connector knows roles and bytes, but no model and no life cycle of vLLM. The contract is in :mod:`.base`.
"""
