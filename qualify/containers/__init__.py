# SPDX-License-Identifier: Apache-2.0
"""The cells as containers: images that hold exactly a cell, and sessions that run in one without a network.

`engine` finds or starts an engine, `base` makes the first layer, `image` the cell's image, `container` a life that
leaves nothing behind, `checkout` carries this checkout in, `tree` says what an image holds.
"""
