# SPDX-License-Identifier: Apache-2.0
"""The demonstration: small checkpoints, recorded generations, and the comparison of native with AFD.

`checkpoints` makes the models, `client` and `native` record generations (over HTTP and in process),
`parity` compares two records, `runner` and `report` are what `afd demo` runs and prints. Nothing here is
imported by a serving process.
"""
