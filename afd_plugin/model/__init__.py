# SPDX-License-Identifier: Apache-2.0
"""The model seam: each role builds, reads and holds only its half of a native vLLM model.

:mod:`.build` scopes a construction to a role, :mod:`.loader` reads what the built model owns, :mod:`.scan` proves that
nothing escaped. No model file of vLLM is known here by name: modules are recognised by type and by identity.
"""
