# SPDX-License-Identifier: Apache-2.0
"""``python -m afd_plugin.cli``: the same as the console script ``afd``."""

from afd_plugin.cli.app import main

if __name__ == "__main__":
    main()
