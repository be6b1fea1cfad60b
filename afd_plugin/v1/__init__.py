# SPDX-License-Identifier: Apache-2.0
"""What runs inside vLLM's V1 engine: the roles' workers and model runners, and what they refuse."""
