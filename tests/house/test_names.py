"""Words that the house has another name for, in names and in sentences.

Each test names every offender at once. An exception stands here with its reason, in one line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .sources import PACKAGE, assigned, modules, parameters_of, texts

# Words that say nothing, or that have another name in this house (docs/adr/0007).
WORDS = {
    **dict.fromkeys(("manager", "util", "utils", "helper", "helpers", "misc"), "say what it does"),
    "common": "name what is in it",
    "role": "kind",
    "roles": "kinds",
    "hot": "only in vLLM, whose tiers are called so",
    "cold": "only in vLLM, whose tiers are called so",
    **dict.fromkeys(("weigh", "weighs", "weighed", "weighing"), "compare"),
    **dict.fromkeys(("spell", "spells", "spelled", "spelt", "spelling"), "write, or name"),
    **dict.fromkeys(("knob", "knobs"), "setting"),
    **dict.fromkeys(("law", "laws"), "equation, or the name of the law"),
    **dict.fromkeys(("departure", "departures"), "ending"),
    **dict.fromkeys(("mend", "mends", "mended", "mending"), "fix"),
    **dict.fromkeys(("tidy", "tidies", "tidied", "tidying"), "say what is done"),
}

WORDS_ALLOWED = {
    "integrations/vllm/": "vLLM's own names: its managers, its hot and its cold tier",
}

# The same in sentences: pages, comments, docstrings and messages. Other words that names may not
# have (a manager, a role) are ordinary words there.
IN_SENTENCES = re.compile(
    r"\b(knobs?|laws?|departures?|mend(s|ed|ing)?|spell(s|ed|ing)?|spelt|tid(y|ies|ied|ying)"
    r"|weigh(s|ed|ing)?)\b",
    re.IGNORECASE,
)
NAMED_LAWS = re.compile(r"\b(Little's\s+law|Zipf's\s+law|Scaling\s+Laws)\b")
SENTENCES_ALLOWED = {
    "cxl_offload/former_names.py": "old names",
    "CHANGELOG.md": "old names",
    "tests/house/test_names.py": "the words themselves",
}

# Sentences of the package say "most used", "near", "idle" or "far" instead.
HOT_OR_COLD = re.compile(r"\b(hot|cold)(t?er|t?est)?\b|\b(hot|cold)_", re.IGNORECASE)
HOT_OR_COLD_ALLOWED = {
    "former_names.py": "old names",
    "integrations/transformers/prefix_options.py": "it compares itself with vLLM's cold tier",
    "integrations/transformers/scope.py": "old keywords",
    "topology/hazards/kernel.py": "an action of DAMON",
    "tune/counts.py": "the label of the metric",
    "tune/most_used_parts.py": "the label of the metric, and an old attribute",
}


def named(name: str, tree: ast.Module) -> Iterator[str]:
    """What a module names: itself, what its body assigns, classes, functions, parameters,
    attributes."""
    yield Path(name).stem
    yield from (each for each, _ in assigned(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from parameters_of(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_words_that_the_house_has_another_name_for_are_not_used() -> None:
    offenders = []
    for name, tree in modules():
        if name.startswith(tuple(WORDS_ALLOWED)):
            continue
        for each in sorted(set(named(name, tree))):
            offenders += [
                f"{name}: {each}: {word} -> {WORDS[word]}" for word in words_of(each) & set(WORDS)
            ]
    assert not offenders, "\n".join(offenders)


def test_words_are_found_in_what_a_module_assigns() -> None:
    tree = ast.parse("_TIDY = 1e-7\nA, COLD_ROWS = 1, 2\nlocal_roles: int = 3")
    words = set().union(*map(words_of, named("room/module.py", tree)))
    assert words & set(WORDS) == {"tidy", "cold", "roles"}


def said(text: str) -> list[str]:
    """The words that the house has another name for in a text, without laws that have a name."""
    return [found.group() for found in IN_SENTENCES.finditer(NAMED_LAWS.sub("", text))]


def test_sentences_do_without_words_that_the_house_has_another_name_for() -> None:
    found = {name: said(text) for name, text in texts()}
    offenders = [
        f"{name}: {', '.join(words)}"
        for name, words in found.items()
        if words and name not in SENTENCES_ALLOWED
    ]
    assert not offenders, "\n".join(offenders)
    assert all(found[name] for name in SENTENCES_ALLOWED), "an exception that nothing needs"


def test_hot_and_cold_are_said_of_vllm_only() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if HOT_OR_COLD.search(path.read_text())
    }
    ours = {name for name in found if not name.startswith("integrations/vllm/")}
    assert ours == set(HOT_OR_COLD_ALLOWED)


def test_words_are_found_in_every_inflection_and_named_laws_are_left() -> None:
    assert said(
        "Two knobs were tidied, weighed and spelled; the laws mended. A weight is one."
    ) == [
        "knobs",
        "tidied",
        "weighed",
        "spelled",
        "laws",
        "mended",
    ]
    assert said("By Little's law, and by Little's\nlaw again.") == []
