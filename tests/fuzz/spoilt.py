"""Sound documents with one edit more: a nasty value, or what stood elsewhere."""

from __future__ import annotations

import re

NASTY = (
    *("", "0", "-1", "-0.0", "1e999", "nan", ".nan", ".inf", "null", "~", "true", "[]", "{}"),
    *("9" * 30, "9" * 5000, "1" + "0" * 400, "0x", "0b2", "1:99", "1_0", "١٢", "²", "0.5", "01"),
    *(
        "2001-13-45",
        "!!bool x",
        "!!int ''",
        "!!int x",
        "!!float ''",
        "!!timestamp x",
        "!!python/x y",
    ),
    *("!!binary é", "!!null x", "!!set {a}", "&a [*a]", "*a", "&a x", "{<<: *a}", "? x", "!<> x"),
    *(
        "\x00",
        "\x85",
        "\u2028",
        "\ud7ff",
        "\ufeff",
        "a\nb",
        "'\n'",
        "\t",
        "%",
        "---",
        "...",
        "|",
        ">",
    ),
    *('"\\ud800"', '"\\u0000"', '"\\n"', "[" * 3000, "{a: " * 1500, '{"a":' * 1500, "- " * 2000),
    *(
        "0-99999999999",
        "0-3",
        "-",
        ",",
        "=",
        ":",
        ";",
        "@",
        "/",
        "..",
        "x" * 3000,
        "NaN",
        "Infinity",
    ),
    "{a: &a [x,x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b],"
    " d: &d [*c,*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d,*d], f: [*e,*e,*e,*e,*e,*e,*e]}",
)
_TOKEN = re.compile(r"[^\s,:{}\[\]\"']+|[,:{}\[\]\"']")


class Decisions:
    """Bytes as decisions; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        return (self.byte() << 8 | self.byte()) % max(count, 1)

    def rest(self) -> bytes:
        return self._data[self._at :]


def spoil(text: str, decisions: Decisions) -> str:
    """The text with one edit."""
    edit = decisions.byte() % 8
    if edit < 4:  # a token becomes a nasty one, or one from elsewhere
        tokens = list(_TOKEN.finditer(text))
        if not tokens:
            return NASTY[decisions.below(len(NASTY))]
        chosen = tokens[decisions.below(len(tokens))]
        other = (
            NASTY[decisions.below(len(NASTY))]
            if edit < 3
            else tokens[decisions.below(len(tokens))].group()
        )
        return text[: chosen.start()] + other + text[chosen.end() :]
    lines = text.split("\n")
    at = decisions.below(len(lines))
    if edit == 4:
        del lines[at]
    elif edit == 5:
        lines.insert(decisions.below(len(lines)), lines[at])
    elif edit == 6:
        key, colon, _ = lines[at].partition(":")
        lines[at] = key + colon + " " + NASTY[decisions.below(len(NASTY))]
    else:
        cut = decisions.below(len(text) + 1)
        return text[:cut] + NASTY[decisions.below(len(NASTY))] + text[cut:]
    return "\n".join(lines)
