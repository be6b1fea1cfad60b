# SPDX-License-Identifier: Apache-2.0
"""Every use of vLLM is a registered seam, every seam's upstream source is unchanged, nothing is patched or copied.

`python -m qualify.audit` reads sources only: neither vLLM nor torch is imported. Each check is a module:
`drift` (registry against the installed vLLM), `imports` and `overrides` (read from our syntax trees), `attributes`
(read from the type checker), `traced` (read from a recorded run, `trace`), `patches`, `copies`; `coverage` compares
the uses they found with the registry, in both directions, and `references` checks what the entries point at.
"""
