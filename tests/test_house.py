"""Rules of the house that are read off the sources: names, words, lengths.

Each test names every offender at once. An exception stands here with its reason, in one line.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cxl_offload"

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 40
"""Without its docstring."""
MOST_PARAMETERS = 8

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
    "tune/": "hot: the word of the papers for the items that are used most",
    "integrations/transformers/": "hot: the same of experts",
}

# The same in sentences: pages, comments, docstrings and messages. Other words that names may not
# have (a manager, a role, hot items) are ordinary words there.
IN_SENTENCES = re.compile(
    r"\b(knobs?|laws?|departures?|mend(s|ed|ing)?|spell(s|ed|ing)?|spelt|tid(y|ies|ied|ying)"
    r"|weigh(s|ed|ing)?)\b",
    re.IGNORECASE,
)
NAMED_LAWS = re.compile(r"\b(Little's\s+law|Zipf's\s+law|Scaling\s+Laws)\b")
SENTENCES_ALLOWED = {
    "cxl_offload/renamed.py": "old names",
    "CHANGELOG.md": "old names",
    "tests/test_house.py": "the words themselves",
}

AN_OPTION_A_LINE = "a line for each option of the command line and each field of the request"

LONG_FUNCTIONS = {
    "cli/generate.py generate": AN_OPTION_A_LINE,
    "cli/_plan_cache.py cache": AN_OPTION_A_LINE,
    "cli/_plan_fleet.py fleet": AN_OPTION_A_LINE,
    "cli/plan.py inference": AN_OPTION_A_LINE,
    "cli/plan.py training": AN_OPTION_A_LINE,
    "cli/tco.py tco_command": AN_OPTION_A_LINE,
    "cli/profile.py profile": AN_OPTION_A_LINE,
    "integrations/flexgen/options.py build_parser": AN_OPTION_A_LINE,
    "integrations/transformers/scope.py offload": "a line for each of its options, twice",
    "integrations/deepspeed/accelerator.py _tiered": "one class; its base is known late",
    "integrations/flexgen/loaded_model.py LoadedModel._load": (
        "what is opened one after the other and closed in the reverse order"
    ),
    "ops/attention.py _run": "one call of the core, a line for each of its arguments",
    "plan/flexgen/planner.py plan_flexgen": "one search, whose bounds and best belong together",
    "sim/timeline.py Timeline.of": "a line for each field",
}

OPTIONS = "options of the command line, each by its name"
KEYWORDS = "by keyword only, each with a default"

MANY_PARAMETERS = {
    "cli/generate.py generate": OPTIONS,
    "cli/_plan_cache.py cache": OPTIONS,
    "cli/_plan_fleet.py fleet": OPTIONS,
    "cli/plan.py inference": OPTIONS,
    "cli/plan.py training": OPTIONS,
    "cli/profile.py profile": OPTIONS,
    "cli/tco.py tco_command": OPTIONS,
    "integrations/transformers/scope.py offload": KEYWORDS,
    "integrations/transformers/scope.py Offloaded.__init__": KEYWORDS,
    "ops/adam.py adam_step": "four tensors, and the settings of torch.optim by their names there",
    "ops/attention.py _run": "the core's arguments; callers have them as AttentionOptions",
    "ops/attention_op.py decode_attention": "torch reads an operator's schema off its parameters",
    "ops/optimizer.py OnePassOptimizer.__init__": KEYWORDS,
    "profile/measure/run.py measure_machine": KEYWORDS,
    "sim/timeline.py Timeline.of": "what a replay knows, by keyword, for its one caller",
    "tune/step_tuner.py StepTuner.__init__": KEYWORDS,
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Path inside of the package, and its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), parse(path)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function by its name, a method by that of its class and its own."""
    owner = {
        child: f"{node.name}."
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner.get(node, "") + node.name, node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each.arg for each in given if each.arg not in ("self", "cls")]


ALIASES_ALLOWED = {"T": "a type variable, by its usual name"}


def alias_of(node: ast.AST) -> str | None:
    """The name that a statement gives to a type: an alias, a new type, a type variable."""
    if type(node).__name__ == "TypeAlias":  # ``type X = ...``, of Python 3.12
        return str(node.name.id)  # type: ignore[attr-defined]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        if not ast.unparse(node.annotation).endswith("TypeAlias"):
            return None
        target, value = node.target, node.value
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2]
        is_type = made in ("NewType", "NamedTuple", "namedtuple", "TypedDict", "TypeVar")
        is_type |= isinstance(value, ast.Subscript | ast.Name | ast.Attribute)
        is_type |= isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)
        if not is_type:
            return None
    else:
        return None
    if not isinstance(target, ast.Name):
        return None
    is_named_as_one = re.fullmatch(r"_?[A-Z](?=.*[a-z])[A-Za-z0-9]*|_?[A-Z]", target.id)
    return target.id if is_named_as_one else None


def type_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every class and alias of a module, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif (name := alias_of(node)) is not None and name not in ALIASES_ALLOWED:
            yield name, node.lineno  # type: ignore[attr-defined]


def test_class_names_occur_once() -> None:
    places = defaultdict(list)
    for name, tree in modules():
        for each, line in type_names(tree):
            places[each].append(f"{name}:{line}")
    offenders = [f"{each}: {', '.join(at)}" for each, at in places.items() if len(at) > 1]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    "text",
    [
        "Way = Literal['read', 'write']",
        "Way: TypeAlias = int | str",
        "Way = Callable[[int], None]",
        "Way = int | None",
        "Way = NewType('Way', int)",
        "Way = NamedTuple('Way', [('a', int)])",
        "Way = typing.TypeVar('Way')",
        "class Way: ...",
        pytest.param(
            "type Way = int | str",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="3.12 has them"),
        ),
    ],
)
def test_name_of_a_type_is_seen_in_every_form(text: str) -> None:
    assert [name for name, _ in type_names(ast.parse(text))] == ["Way"]


def test_names_of_values_are_no_names_of_types() -> None:
    text = (
        "WAYS = KINDS[0]\nway = Literal['a']\nWay = make()\nWay.name = int | str\nT = TypeVar('T')"
    )
    assert not list(type_names(ast.parse(text)))


SAID_TWICE = {
    "T": "a type variable, whose name is its value",
    "VERSION": "of different forms of files, which grow apart",
    "LOG": "the logger of a module, or of a room",
    "TIE": "how near two floats count as one: of searches that compare other things",
    "ROUNDING": "the same of gains and of scores",
    "TURNS": "of measurements of other things",
}
"""Constants that two modules may have with one value, since it is not one fact."""


def constants() -> Iterator[tuple[str, str, str]]:
    """Name without underscores, value as it is written, and module, of every constant."""
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                target, value = node.target, node.value
            else:
                continue
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]*", target.id):
                yield target.id.strip("_"), ast.unparse(value), name


def test_no_two_modules_know_the_same_constant() -> None:
    places = defaultdict(list)
    for constant, value, module in constants():
        places[constant, value].append(module)
    doubled = {each: at for each, at in places.items() if len(at) > 1}
    offenders = [
        f"{constant} = {value}: {', '.join(at)}"
        for (constant, value), at in doubled.items()
        if constant not in SAID_TWICE
    ]
    offenders += [
        f"{constant} is in one module only; take it off the list"
        for constant in SAID_TWICE
        if not any(constant == each for each, _ in doubled)
    ]
    assert not offenders, "\n".join(offenders)


ONE_PLACE = {
    r"\"/sys/bus/pci/devices\"": ("topology/tree.py",),
    r"\"CXL_OFFLOAD_PLAN\"": (
        "plan/environment.py",
        "integrations/autostart/sitecustomize.py",  # begins before the package can be loaded
    ),
    r", 255\)": (),  # a distance without a path, as a default: NO_PATH_DISTANCE
    r"\bgroup(_size|_elements)?(: int)? ?= ?64\b": (),  # plan/kv_types.py has FlexGen's GROUP
    r"(Usable|Margin) = 0\.\d|\] = 0\.8,": (),  # plan/usable.py
    r"= 256,": (),  # plan/vllm/defaults.py
}
"""Facts that were written more than once, and the modules that may have them now."""


def test_facts_are_written_in_one_place() -> None:
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            offenders += [
                f"{name}:{number}: {line.strip()}"
                for fact, homes in ONE_PLACE.items()
                if re.search(fact, line) and name not in homes
            ]
    assert not offenders, "\n".join(offenders)


def test_public_names_are_listed_only_where_they_are_handed_on() -> None:
    """Elsewhere the underscore says what is private; a list would say it a second time."""
    offenders = []
    for name, tree in modules():
        defined = {getattr(node, "name", "") for node in tree.body}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in tree.body:
            if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "__all__":
                continue
            if not name.endswith("__init__.py") and set(ast.literal_eval(node.value)) <= defined:
                offenders.append(f"{name}: __all__ names nothing that comes from elsewhere")
    assert not offenders, "\n".join(offenders)


def named(name: str, tree: ast.Module) -> Iterator[str]:
    """What a module names for others: itself, classes, functions, parameters, attributes."""
    yield Path(name).stem
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


def texts() -> Iterator[tuple[str, str]]:
    """Path from the root, and text, of what people read."""
    root = PACKAGE.parent
    for folder in ("benchmarks", "csrc", "cxl_offload", "docs", "examples", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cc", ".cu", ".h", ".md", ".py", ".pyi"):
                yield path.relative_to(root).as_posix(), path.read_text()
    for path in sorted(root.glob("*.md")):
        yield path.name, path.read_text()


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


def test_the_core_asks_no_object_for_its_type() -> None:
    """A contract says what differs (csrc/memory/region.h), and an error is caught by its type."""
    sources = [text for name, text in texts() if name.startswith("csrc/")]
    assert any("static_cast<" in text for text in sources)
    found = [name for name, text in texts() if name.startswith("csrc/") and "dynamic_cast" in text]
    assert not found, found


def test_files_are_short() -> None:
    lengths = {name: len((PACKAGE / name).read_text().splitlines()) for name, _ in modules()}
    long = {name: count for name, count in lengths.items() if count > MOST_FILE_LINES}
    assert not long, "\n".join(f"{name}: {count}" for name, count in long.items())


def test_functions_are_short_or_have_a_reason() -> None:
    found = {}
    for name, tree in modules():
        for each, function in functions(tree):
            if lines_of(function) > MOST_FUNCTION_LINES:
                found[f"{name} {each}"] = lines_of(function)
    assert not (wrong := _off_the_list(found, LONG_FUNCTIONS, "lines")), wrong


def test_functions_of_benchmarks_are_short() -> None:
    offenders = [
        f"benchmarks/{path.name} {name}: {lines_of(function)} lines"
        for path in sorted((PACKAGE.parent / "benchmarks").glob("*.py"))
        for name, function in functions(parse(path))
        if lines_of(function) > MOST_FUNCTION_LINES
    ]
    assert not offenders, "\n".join(offenders)


def test_parameters_are_few_or_have_a_reason() -> None:
    found = {}
    for name, tree in modules():
        for each, function in functions(tree):
            if len(parameters_of(function)) > MOST_PARAMETERS:
                found[f"{name} {each}"] = len(parameters_of(function))
    assert not (wrong := _off_the_list(found, MANY_PARAMETERS, "parameters")), wrong


def _off_the_list(found: Mapping[str, int], known: Collection[str], what: str) -> str:
    """Offenders that no reason excuses, and reasons that nothing needs any more."""
    lines = [f"{each}: {found[each]} {what}" for each in sorted(found.keys() - set(known))]
    stale = sorted(set(known) - found.keys())
    return "\n".join(lines + [f"{each}: short enough; take it off the list" for each in stale])


def test_reason_that_nothing_needs_is_refused() -> None:
    found = {"a.py long": 50, "a.py longer": 60}
    assert _off_the_list(found, ["a.py long", "a.py longer"], "lines") == ""
    assert _off_the_list(found, ["a.py long"], "lines") == "a.py longer: 60 lines"
    stale = _off_the_list(found, [*found, "a.py gone"], "lines")
    assert stale == "a.py gone: short enough; take it off the list"


def test_decisions_have_a_number_each_and_say_it() -> None:
    files = sorted((PACKAGE.parent / "docs" / "adr").glob("0*.md"))
    numbers = [int(file.name.partition("-")[0]) for file in files]
    assert numbers == list(range(1, len(files) + 1)), [file.name for file in files]
    heads = [file.read_text().partition("\n")[0] for file in files]
    wrong = [
        head for head, number in zip(heads, numbers, strict=True) if f"# {number}. " not in head
    ]
    assert not wrong, wrong


def test_benchmarks_are_run_in_one_way() -> None:
    """As ``python -m benchmarks.NAME``, where a bare import of what is beside them fails."""
    folder = PACKAGE.parent / "benchmarks"
    beside = {path.stem for path in folder.glob("*.py")}
    found = [
        f"benchmarks/{path.name}:{node.lineno}"
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in beside
    ]
    pages = [*PACKAGE.parent.glob("*.md"), *(PACKAGE.parent / "docs").rglob("*.md")]
    found += [page.name for page in pages if "python benchmarks/" in page.read_text()]
    assert not found, found
