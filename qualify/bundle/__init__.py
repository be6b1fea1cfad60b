# SPDX-License-Identifier: Apache-2.0
"""An offline bundle of a cell: site-packages, and Python itself if wanted, in parts with checksums.

For a host without an index: `install` fills a folder, `pack` writes the parts, and `unpack.py`, which is packed beside
them and needs nothing but a Python, checks and unpacks them there.
"""
