# SPDX-License-Identifier: Apache-2.0
"""Process supervision for `afd`: start children, merge their logs, watch them, end them.

Knows processes, pipes and ports; knows neither vLLM nor torch nor what a role is. One
:class:`~.supervisor.Supervisor` owns a few children, each in a session of its own, and promises that
nothing of them is left when it returns, nor when it is killed itself (:mod:`~.guardian`).
"""
