# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.accuracy`: the gate."""

import sys

from qualify.accuracy.gate import main

if __name__ == "__main__":
    sys.exit(main())
