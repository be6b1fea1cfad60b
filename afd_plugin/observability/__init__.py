# SPDX-License-Identifier: Apache-2.0
"""What a running service shows of itself: metrics, a status endpoint, events in the log.

Lowest but for the errors: knows no vLLM, no torch and no other part of this package.
"""
