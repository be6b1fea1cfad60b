# SPDX-License-Identifier: Apache-2.0
"""`python -m qualify.accuracy`: the gate."""

import sys

from afd_plugin.supervisor.signals import leave_by_exit
from qualify.accuracy.gate import main

if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main())
