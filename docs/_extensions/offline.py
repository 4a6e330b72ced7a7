"""Fails the build of the site when a page would load something from the network."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What a browser fetches by itself: not the target of a link, which a reader has to follow.
_ADDRESS = r"[\"']?((?:https?:)?//[^\"' >]+)"
_FETCHED = (
    re.compile(r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=" + _ADDRESS),
    re.compile(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=" + _ADDRESS),
    re.compile(r"(?:url\(|@import\s*)[\"' ]*((?:https?:)?//[^\"') ;]+)"),
)


def fetched_addresses(text: str) -> list[str]:
    """Addresses in HTML or CSS that a browser fetches without being asked."""
    return [found for pattern in _FETCHED for found in pattern.findall(text)]


def _check(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    offenders = [
        f"{page.relative_to(out)} fetches {address}"
        for page in sorted([*out.rglob("*.html"), *out.rglob("*.css"), *out.rglob("*.svg")])
        for address in fetched_addresses(page.read_text(encoding="utf-8"))
    ]
    if offenders:
        raise ExtensionError("the site asks the network:\n" + "\n".join(offenders))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True}
