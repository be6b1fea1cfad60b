# SPDX-License-Identifier: Apache-2.0
"""Workers and model runners: where the role meets vLLM's life cycle.

One concern per file: ``fingerprints`` says what a process was started with, ``attention_link`` and ``ffn_service`` are
the two ends of a running service, ``announcer`` turns forward passes into announced steps, ``failure_guard`` bounds
what happens when the other side is lost, and the ``*_worker`` files bind these to vLLM's worker classes.
"""
