"""What the pages of HTML that calm writes have in common: each is one file that needs no network.

Templates are in page/: what surrounds each page, the flame graph and its table of stacks, tables that sort,
and styles. Each command has a page.html of its own, which fills the blocks of base.html. A page is ASCII, so
it reads the same in any encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from calm.core.documents import Document
from calm.core.profile_model import Frame, Stack

Data = dict[str, Any]

# Of the flame graph; the page reserves its height before the scripts run.
ROW_PX = 19
_HIDDEN = {ord(character): 0xE000 + index for index, character in enumerate("<>()-")}
_FUNCTIONS_IN_A_SUMMARY = 5
_Kind = TypeVar("_Kind", bound=Document)


def printable(document: _Kind) -> _Kind:
    """The same, with texts that a screen can show and that do not reorder the rest of the line."""
    return msgspec.convert(_printable(msgspec.to_builtins(document)), type(document))


def _printable(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


def _prose(text: str) -> Markup:
    """A sentence, with code between backticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def flame(
    frames: Sequence[Frame],
    stacks: Iterable[Stack],
    kinds: Mapping[str, tuple[str, str]],
    units: Mapping[str, str],
    causes: Mapping[str, str] | None = None,
) -> Data:
    """What the flame graph's script draws from; by kind of stack: title and noun, and s, bytes or count."""
    return {
        "causes": dict(causes or {}),
        "nouns": {kind: noun for kind, (_, noun) in kinds.items()},
        "units": dict(units),
        "row": ROW_PX,
        "frames": _numbered(frames),
        "stacks": [msgspec.to_builtins(stack) for stack in stacks if stack.weight > 0],
    }


def render(package: str, *, frames: Sequence[Frame], stacks: Iterable[Stack], **values: Any) -> str:  # noqa: ANN401
    """The text of page.html among the templates of a package, all ASCII.

    base.html needs `profile`, `title` and `data`; flame.html `kinds` and `units` as in `flame`, `amount`,
    `percent`, and `cause_of`, or None.
    """
    by_kind: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=lambda stack: -stack.weight):
        by_kind.setdefault(stack.kind, []).append(stack)
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "page"), PackageLoader("calm.core", "page")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"prose": _prose}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    text = environment.get_template("page.html").render(
        tool=f"calm {package.rpartition('.')[2]}",
        stacks=by_kind,
        summary=lambda stack: summary(frames, stack.frames),
        **values,
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


def summary(frames: Sequence[Frame], stack: Sequence[int]) -> str:
    """The innermost functions of a stack: the program's own, if there are any."""
    found = [frames[index] for index in reversed(stack)]
    own = [frame for frame in found if not frame.kernel] or found
    # A function that calls itself is named once.
    names = [name for name, _ in groupby(short(frame.function) for frame in own)]
    if len(names) > _FUNCTIONS_IN_A_SUMMARY:
        names[_FUNCTIONS_IN_A_SUMMARY:] = ["…"]
    return " ← ".join(names)


def _numbered(found: Sequence[Frame]) -> list[Data]:
    """For the scripts. Frames that differ by their line only have the same number."""
    numbers: dict[tuple[str, str, bool, bool], int] = {}
    made = []
    for frame in found:
        key = (frame.function, frame.module, frame.kernel, frame.inlined)
        number = numbers.setdefault(key, len(numbers))
        made.append(msgspec.to_builtins(frame) | {"label": short(frame.function), "number": number})
    return made


def six_digits(value: float) -> float:
    """Six digits: a screen shows no more."""
    return float(f"{value:.6g}")


def short(function: str) -> str:
    """A C++ function without the contents of its angle brackets and parentheses."""
    # Characters of private use stand for brackets that are no pair: those of operators' names.
    operators = r"\boperator\s*(\(\)|<=>|<<=?|>>=?|<=|>=|->\*?|<|>)"
    text = re.sub(operators, lambda match: match[0].translate(_HIDDEN), function)
    text = text.replace("(anonymous namespace)", "{anonymous}")
    for pair in ("<>", "()"):
        text, before = text.replace(pair, pair.translate(_HIDDEN)), ""
        while text != before:
            # The innermost pairs first.
            before, text = text, re.sub(r"{0}[^{0}{1}]+{1}".format(*map(re.escape, pair)), "\ue010", text)
        text = text.replace("\ue010", f"{pair[0]}…{pair[1]}".translate(_HIDDEN))
    return text.translate({hidden: chr(shown) for shown, hidden in _HIDDEN.items()})
