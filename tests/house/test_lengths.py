"""How long files and functions are, and how many parameters they take.

Each test names every offender at once. An exception stands here with its reason, in one line.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from .sources import PACKAGE, functions, modules, parameters_of, parse

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 40
"""Without its docstring."""
MOST_PARAMETERS = 8

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


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


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
