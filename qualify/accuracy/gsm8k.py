# SPDX-License-Identifier: Apache-2.0
"""The full-scale path: GSM8K, five worked examples, a real model, native against AFD over HTTP.

`python -m qualify.accuracy.gsm8k --model FOLDER --train FILE --test FILE [--gpu] [--reference LOW HIGH]`. Model and
data are local files: nothing is fetched. The data files hold one JSON object a line with `question` and `answer`, as
GSM8K is published. All rows of the test file are asked; fewer than 1,319 are a diagnosis.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from afd_plugin.demo.engine import EngineArguments
from afd_plugin.demo.service import ServiceError
from afd_plugin.supervisor.signals import leave_by_exit
from qualify.accuracy import data
from qualify.accuracy.gate import DIAGNOSTIC, OUTPUT, answers, write_accounts
from qualify.accuracy.harness import HarnessFailed
from qualify.accuracy.scoring import Side, Unscorable
from qualify.accuracy.sides import Layout, Place
from qualify.accuracy.verdict import Comparison

TASK = "afd_gsm8k"
ROWS = 1319
WORKED_EXAMPLES = 5
FORM = {"question", "answer"}


class NotTheForm(ValueError):
    """A data file is not in GSM8K's form; the message names the line."""


def lines(path: Path) -> list[dict[str, str]]:
    """The rows of a data file; NotTheForm for a row without question, answer or final number."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict) or not set(row) >= FORM or "#### " not in row["answer"]:
            raise NotTheForm(f"{path}:{number}: a question and an answer with `#### NUMBER` were expected")
        rows.append({name: row[name] for name in sorted(FORM)})
    return rows


def prepare(train: Path, test: Path, folder: Path) -> dict[str, int]:
    """Copy both files into `folder` under the names that the task file knows; rows by task."""
    folder.mkdir(parents=True)
    worked, asked = lines(train), lines(test)
    if len(worked) < WORKED_EXAMPLES:
        raise NotTheForm(f"{train} has {len(worked)} worked examples, {WORKED_EXAMPLES} are needed")
    data.write_lines(folder / "train.jsonl", worked)
    data.write_lines(folder / "test.jsonl", asked)
    return {TASK: len(asked)}


def verdict(comparison: Comparison, reference: tuple[float, float] | None) -> tuple[str, ...]:
    """Why the comparison does not pass; native's range is the model's known one, two standard errors wider."""
    pooled = comparison.pooled
    if reference is None:
        return comparison.faults((0.0, 1.0), ROWS)
    error = math.sqrt(pooled.native * (1 - pooled.native) / pooled.rows)
    return comparison.faults((reference[0] - 2 * error, reference[1] + 2 * error), ROWS)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when AFD passed on all rows, 1 when not, 2 when nothing was measured, 3 for a diagnosis."""
    parser = argparse.ArgumentParser(prog="python -m qualify.accuracy.gsm8k", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model and its tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="file of which the first five are shown")
    parser.add_argument("--test", type=Path, required=True, help="file of which every row is asked")
    parser.add_argument("--gpu", action="store_true", help="serve on this host's GPUs")
    parser.add_argument(
        "--reference", type=float, nargs=2, metavar=("LOW", "HIGH"), help="native's known score"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs instead of eagerly")
    parser.add_argument("--bitwise", action="store_true", help="answers must be equal to the last character")
    parser.add_argument("--hours", type=float, default=4.0, help="limit of one side")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args(arguments)
    engine = EngineArguments(
        max_model_len=chosen.max_model_len,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_num_seqs=4,
        enforce_eager=not chosen.graphs,
    )
    folder = chosen.output / f"gsm8k-{time.strftime('%Y%m%d-%H%M%S')}"
    found: dict[Layout, Side] = {}
    try:
        rows = prepare(chosen.train, chosen.test, folder / "questions")
        for layout in (Layout.NATIVE, Layout.ONE_ONE):
            found[layout], seconds = answers(
                layout,
                chosen.model,
                rows,
                folder / layout.value,
                folder / "questions",
                engine=engine,
                place=Place.here(gpu=chosen.gpu),
                timeout_s=chosen.hours * 3600,
            )
            side = found[layout]
            print(f"{layout.value}: {sum(side.right)} of {side.scored} right in {seconds:.0f} s", flush=True)
    except (OSError, NotTheForm, json.JSONDecodeError) as error:
        print(f"gsm8k: {error}", file=sys.stderr)
        return 2
    except (ServiceError, HarnessFailed, Unscorable) as error:
        print(f"gsm8k is FAIL: {error}", file=sys.stderr)
        return 1
    comparison = Comparison.of(found[Layout.NATIVE], found[Layout.ONE_ONE], bitwise=chosen.bitwise)
    faults = verdict(comparison, tuple(chosen.reference) if chosen.reference else None)
    digests = {"gsm8k_questions": data.digest(folder / "questions")}
    for layout, side in found.items():
        digests |= {
            f"gsm8k_{layout.value}_results": side.results,
            f"gsm8k_{layout.value}_samples": side.samples,
        }
    write_accounts(comparison.metrics("gsm8k"), digests)
    print(json.dumps(comparison.metrics("gsm8k"), indent=1))
    for name, value in sorted(digests.items()):
        print(f"sha256 {name} {value}")
    if rows[TASK] < ROWS:
        print(
            f"DIAGNOSTIC, not evidence: {rows[TASK]} rows of {ROWS}; "
            + ("; ".join(faults) or "no fault seen")
        )
        return DIAGNOSTIC
    print("gsm8k: " + ("FAIL\n  " + "\n  ".join(faults) if faults else "PASS"))
    return 1 if faults else 0


if __name__ == "__main__":
    leave_by_exit()
    sys.exit(main())
