# SPDX-License-Identifier: Apache-2.0
"""Accuracy of trained test models: data, training, lm-eval over HTTP, paired statistics, numeric probes.

Not shipped. `docs/accuracy.md` says what is measured and what it can see.
"""
