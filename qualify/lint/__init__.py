# SPDX-License-Identifier: Apache-2.0
"""The project's own rules: what no general linter knows. `python -m qualify.lint [--fix]`.

Every rule is a pure function from text (or sizes) to findings. A finding that is right as it stands is
allowed where it is found, by a comment that says why: `# lint: allow RULE: reason`, on that line or alone on
the line above. An allowance without a reason, or one that allows nothing any more, is itself a finding.
"""
