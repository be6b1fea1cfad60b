# SPDX-License-Identifier: Apache-2.0
"""What a change means for one use: UNCHANGED, MECHANICAL, BEHAVIORAL or ARCHITECTURAL, by rules that say why.

Every rule that applies is reported; the gravest decides. The rules judge the seam from the difference of two sources
alone: whether our invariant survives a BEHAVIORAL change is for a person to read, which the report asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from qualify.audit.symbols import Symbol
from qualify.upgrade.callers import CallerDelta
from qualify.upgrade.dependencies import Dependency, Use
from qualify.upgrade.facts import Delta


class Grade(IntEnum):
    """How much a change asks of us; ordered."""

    UNCHANGED = 0
    MECHANICAL = 1
    BEHAVIORAL = 2
    ARCHITECTURAL = 3


_COPIES = frozenset({Use.COPY, Use.RECOPY})
_HANDED_ON = frozenset({Use.OVERRIDE, Use.WRAP, Use.COPY, Use.RECOPY})
_INTERCEPT = frozenset({Use.COPY, Use.WRAP, Use.OVERRIDE, Use.RECOPY, Use.SUBCLASS, Use.SWAP, Use.STUB})
_CONTRACT_ONLY = frozenset({Use.CALL, Use.SWAP, Use.STUB})

RULES = {
    "A0": "it is defined in neither tree: what it became is UNKNOWN",
    "A1": "a symbol that we intercept is gone and nothing took its place",
    "A2": "a copied constructor's original sets new state that its class reads elsewhere: "
    "the copy builds objects that upstream's own methods cannot use",
    "A3": "native code no longer looks the replaced name up: the point of interception must be chosen anew",
    "A4": "native code asked another object who does the work; neither the question nor the attribute is left",
    "B1": "a symbol that we only call or read is gone and nothing took its place",
    "B2": "positional arguments mean something else, or a call as it was written is refused",
    "B3": "another number of values is returned",
    "B4": "the body of a copied function changed: the copy is stale",
    "B5": "the native body no longer calls or sets something it did: order or ownership moved",
    "B6": "native callers hand over more arguments, or other functions call it by its name",
    "B7": "native code asks an object that we replaced for something new",
    "B8": "a class lost public methods, changed bases",
    "B9": "decorators changed: another context runs around the function",
    "B10": "what the value or attribute holds is computed differently",
    "B11": "it refuses what it accepted",
    "M1": "it is found under another name or in another module, its body alike",
    "M2": "the header grew by optional parameters only",
    "M3": "annotations, log lines or messages changed",
    "M4": "the body changed below an equal contract that we only call",
    "M5": "the native body does more than before and nothing less",
    "M6": "a class only gained members, or changed in members that we do not use",
    "M7": "it is new in the target: nothing of the current release is carried over",
}


@dataclass(frozen=True)
class Evidence:
    """What is known about one use in two trees.

    Attributes:
        old: where it is defined in the old tree (None: it was not there).
        new: where it is defined in the new tree (None: it is gone).
        alike: share of common words when it was recognised under another name.
        importable: whether the old import path still leads to it.
        delta: facts between the two definitions.
        callers: how native callers differ.
        methods_gone: public methods a class lost.
        state_gone: public attributes of its instances that it lost.
        members_changed: members of a class that differ in any way.
        read_elsewhere: new constructor state that other methods of the class read.
        asked: what native code newly asks of the attribute that holds a stub.
        branches_gone: attributes of other objects on which old native code branched and that nobody defines any more.
    """

    old: Symbol | None
    new: Symbol | None
    alike: float = 1.0
    importable: bool = True
    delta: Delta = field(default_factory=Delta)
    callers: CallerDelta = field(default_factory=CallerDelta)
    methods_gone: tuple[str, ...] = ()
    state_gone: tuple[str, ...] = ()
    members_changed: tuple[str, ...] = ()
    read_elsewhere: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    branches_gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The grade of one use and the reasons, gravest first, each `RULE: what was seen`."""

    grade: Grade
    reasons: tuple[str, ...]


def judge(use: Dependency, seen: Evidence) -> Verdict:
    """Apply all rules to one use."""
    fired: dict[str, str] = {}
    if seen.old is None:
        rule = "M7" if seen.new else "A0"
        fired[rule] = str(seen.new or use.symbol)
    elif seen.new is None:
        _gone(use, seen, fired)
    else:
        _header(use, seen, fired)
        _body(use, seen, fired)
        _place(use, seen, fired)
    _surroundings(use, seen, fired)
    if not fired:
        return Verdict(Grade.UNCHANGED, ())
    order = sorted(fired, key=lambda rule: (-grade_of(rule), rule))
    return Verdict(Grade(grade_of(order[0])), tuple(f"{rule}: {fired[rule]}" for rule in order))


def grade_of(rule: str) -> Grade:
    """The grade that a rule gives."""
    return {"A": Grade.ARCHITECTURAL, "B": Grade.BEHAVIORAL, "M": Grade.MECHANICAL}[rule[0]]


def _gone(use: Dependency, seen: Evidence, fired: dict[str, str]) -> None:
    rule = "A1" if use.use in _INTERCEPT else "B1"
    fired[rule] = f"{seen.old or use.symbol} is not defined any more"


def _place(use: Dependency, seen: Evidence, fired: dict[str, str]) -> None:
    if seen.old == seen.new:
        return
    where = f"now {seen.new}" + ("" if seen.alike == 1.0 else f" ({seen.alike:.0%} of its words)")
    if use.use is Use.SWAP and seen.old and seen.new and seen.old.name != seen.new.name:
        fired["A3"] = where
    fired["M1"] = where + ("; the old import still leads there" if seen.importable else "")


def _header(use: Dependency, seen: Evidence, fired: dict[str, str]) -> None:
    delta = seen.delta
    shifted = [f"`{name}` inserted" for name in delta.inserted] + [f"`{n}` required" for n in delta.required]
    shifted += [f"`{name}` removed" for name in delta.removed] + ["order changed"] * delta.reordered
    shifted += [f"default of `{name}`" for name in delta.defaults]
    if shifted:
        fired["B2"] = ", ".join(shifted) + ("; ours hands on by position" if use.positional else "")
    if delta.arity and use.use is not Use.SUBCLASS:
        fired["B3"] = f"{_sizes(delta.arity[0])} before, {_sizes(delta.arity[1])} now"
    if delta.decorators and use.use not in _CONTRACT_ONLY:
        fired["B9"] = ", ".join(delta.decorators)
    if delta.bases:
        fired["B8"] = "bases " + ", ".join(delta.bases)
    if delta.optional:
        fired["M2"] = ", ".join(delta.optional)
    if delta.annotations:
        fired["M3"] = ", ".join(delta.annotations)


def _body(use: Dependency, seen: Evidence, fired: dict[str, str]) -> None:
    delta, name = seen.delta, (seen.new or use.symbol).name
    if seen.methods_gone:
        rule = "B8" if use.use in _INTERCEPT else "M6"
        fired[rule] = "; ".join(filter(None, [fired.get(rule), f"lost {_some(seen.methods_gone)}"]))
    if seen.members_changed or seen.state_gone:
        lost = [f"lost {_some(seen.state_gone)}"] if seen.state_gone else []
        fired["M6"] = "; ".join([*lost, f"{_some(seen.members_changed)} differ"])
    if delta.refusals and use.use in _INTERCEPT:
        fired["B11"] = "; ".join(delta.refusals[:3])
    if not delta.body:
        return
    if not name:
        fired["M4"] = "statements of the module"
        return
    lost = [fact[1:] for fact in (*delta.calls, *delta.state) if fact.startswith("-")]
    if delta.cosmetic and use.use not in _COPIES:
        fired.setdefault("M3", "the body differs in annotations, log lines or messages")
    elif use.use in _COPIES:
        fired["B4"] = (
            f"the body of `{name}` changed: {_some((*delta.calls, *delta.state)) or 'other statements'}"
        )
        if seen.read_elsewhere:
            fired["A2"] = ", ".join(seen.read_elsewhere)
    elif use.use in (Use.OVERRIDE, Use.WRAP) and lost:
        fired["B5"] = f"no longer {_some(lost)}"
    elif use.use in (Use.WRITE, Use.READ) and delta.value:
        fired["B10"] = f"the definition of `{name}` changed"
    elif use.use in (Use.OVERRIDE, Use.WRAP):
        gained = [fact[1:] for fact in (*delta.calls, *delta.state)]
        fired["M5"] = f"newly {_some(gained)}" if gained else "other statements, the same calls"
    elif use.use is not Use.SUBCLASS:
        fired["M4"] = _some((*delta.calls, *delta.state)) or "other statements, the same calls"


def _surroundings(use: Dependency, seen: Evidence, fired: dict[str, str]) -> None:
    if seen.asked:
        fired["B7"] = f"`{use.held_as}` is newly asked for {', '.join(seen.asked)}"
    if seen.branches_gone:
        fired["A4"] = f"nobody asks {', '.join(seen.branches_gone)} any more"
    if use.use in _HANDED_ON:
        words = [*seen.callers.passed, *(f"called by {c}" for c in seen.callers.come)]
        words += [f"not called by {c} any more" for c in seen.callers.gone]
        if words:
            fired["B6"] = _some(words)


def _sizes(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, sizes))


def _some(words: tuple[str, ...] | list[str], limit: int = 5) -> str:
    shown = ", ".join(f"`{word}`" for word in words[:limit])
    return shown + (f" and {len(words) - limit} more" if len(words) > limit else "")
