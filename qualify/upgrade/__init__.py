# SPDX-License-Identifier: Apache-2.0
"""From one exact vLLM to the next: what changed, what it means for this project, whether to go on.

`python -m qualify.upgrade` reads two unmodified vLLM trees (wheels, source distributions, local clones) and prints
one report. Each phase is a module: `freeze` (identity), `inventory` (ours), `changes` and `facts` (the
difference), `rules` (its class), `gate` (stop conditions), `plan` (dispositions); `planning` runs them in order.
Neither vLLM nor torch is imported.
"""
