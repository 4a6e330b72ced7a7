"""The page: its look in light and dark, tables, and escaping."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cxl_offload

_STYLE = """
:root{color-scheme:light dark;--back:#fbfbfa;--card:#fff;--ink:#1c1e21;--dim:#5d646c;--line:#d9dce0;
--shade:#0003;--gpu:#7a4fb5;--ldram:#0072b2;--rdram:#3f9fd6;--cxl:#c8500a;--hbm:#a67c00;--nvme:#6b7280;
--good:#0a7d4f;--warn:#9a6200;--bad:#b3261e;--plain:#8a929b;--s0:#0b8457;--s1:#c2387f;--s2:#0e9aa0;
--s3:#7d8f12;--s4:#7c4a2d;--s5:#39424e}
@media(prefers-color-scheme:dark){:root{--back:#16181b;--card:#1f2226;--ink:#e8eaed;--dim:#a3abb3;
--line:#3a3f45;--shade:#fff4;--gpu:#b794f0;--ldram:#4fa9e3;--rdram:#8cc8ef;--cxl:#f08a4b;--hbm:#d9b44a;
--nvme:#9aa3ad;--good:#4fc08d;--warn:#e0a94a;--bad:#f2887f;--plain:#7e8790;--s0:#4bbd89;--s1:#f279b5;
--s2:#4cc3c9;--s3:#b5c75a;--s4:#c69a7b;--s5:#dfe3e8}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:68rem;margin:0 auto;padding:1.2rem 1rem 3rem}
h1{font-size:1.5rem;line-height:1.25;margin:.4rem 0;overflow-wrap:anywhere}
h2{font-size:1.12rem;margin:0 0 .6rem;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1rem;
margin:1rem 0}
p{margin:.4rem 0;overflow-wrap:anywhere}
.dim,figcaption{color:var(--dim);font-size:.88rem}
.tag{border:1px solid var(--line);border-radius:1rem;padding:.05rem .55rem;font-size:.8rem;
color:var(--dim);white-space:nowrap;font-weight:400}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--card) 30%,transparent) 0 0/2.5rem 100%,
linear-gradient(270deg,var(--card) 30%,transparent) 100% 0/2.5rem 100%,
linear-gradient(90deg,var(--shade),transparent) 0 0/.8rem 100%,
linear-gradient(270deg,var(--shade),transparent) 100% 0/.8rem 100%;background-repeat:no-repeat;
background-attachment:local,local,scroll,scroll}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th{text-align:left;color:var(--dim);font-weight:500}
th,td{padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:normal;min-width:3rem}
@media(max-width:34rem){table{font-size:.82rem}th,td{padding-right:.4rem}section{padding:.8rem}}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.bar{display:flex;height:1.35rem;border-radius:.3rem;overflow:hidden;background:var(--line);
margin:.15rem 0 .55rem}
.bar i{display:block;min-width:2px}
.key:first-child{margin-left:0}
.key{display:inline-block;width:.75rem;height:.75rem;border-radius:.2rem;margin:0 .3rem 0 .8rem}
svg{display:block;max-width:100%;height:auto}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .d{fill:var(--dim)}
.word{display:inline-block;max-width:100%}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem;margin:.5rem 0}
.error{color:var(--bad)}.warning{color:var(--warn)}.note{color:var(--dim)}.good{color:var(--good)}
@media print{section{break-inside:avoid}}
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""No script, no picture and no font from anywhere: what slips in as text stays text."""

_SHORT = 14
_HYPHENED = re.compile(r"\S*-\S*")
_OPTIONS = re.compile(r"--[a-z][a-z0-9-]*")
_BREAKS = re.compile(r"([:@/_](?=\w)|,(?=[a-z]|\d+=))")


@dataclass(frozen=True, slots=True)
class PageSection:
    """A heading, what kind of figures it has (measured, simulated, predicted), and its HTML."""

    title: str
    body: str
    figures: str = ""


def escaped(value: object) -> str:
    """Text for HTML; what no browser shows, as control characters, is a replacement sign."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return html.escape(text, quote=True)


def shortened(text: str, most: int) -> str:
    """At most so many letters; what was cut off is a sign for it."""
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _cell(value: object) -> str:
    """Text of a cell; a long one may be broken behind the signs of policies and paths."""
    text = escaped(value)
    return _BREAKS.sub(r"\1<wbr>", text) if len(text) > _SHORT else text


def _whole_words(text: str, words: re.Pattern[str]) -> str:
    """Escaped text in which no line ends behind a hyphen of these words."""
    return words.sub(r'<span class="word">\g<0></span>', text)


def paragraph(value: object, style: str = "") -> str:
    """A paragraph of plain text; names of options are never broken."""
    text = _whole_words(escaped(value), _OPTIONS)
    return f'<p class="{style}">{text}</p>' if style else f"<p>{text}</p>"


def command_text(value: object) -> str:
    """A command, or lines of commands, which are broken at blanks only."""
    return f"<pre>{_whole_words(escaped(value), _HYPHENED)}</pre>"


def made_now() -> str:
    """What made a page, and when."""
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f"cxl_offload {cxl_offload.__version__}, {made} UTC"


def html_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()
) -> str:
    """A table of plain text, wide ones to be scrolled; nothing where there are no rows."""
    numbers = [heading in set(right) for heading in headings]
    styles = [' class="n"' if number else "" for number in numbers]
    head = "".join(f"<th{s}>{escaped(h)}</th>" for h, s in zip(headings, styles, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{s}>{_cell(cell)}</td>" for cell, s in zip(row, styles, strict=True))
        + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def render_page(title: str, subtitle: str, sections: Iterable[PageSection]) -> str:
    """The whole file.

    Parameters
    ----------
    title, subtitle
        Plain text.
    sections
        In their order; those without a body are left out.
    """
    parts = []
    for each in sections:
        if each.body:
            tag = f' <span class="tag">{escaped(each.figures)}</span>' if each.figures else ""
            parts.append(f"<section><h2>{escaped(each.title)}{tag}</h2>{each.body}</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escaped(title)}</h1><p class="dim">{escaped(subtitle)}</p>'
        + "\n".join(parts)
        + "</main></body></html>\n"
    )
