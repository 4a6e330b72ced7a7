"""Options that the commands which generate have in common: one name and one help text for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunOption:
    """An option of a command line.

    Attributes
    ----------
    flag
        With its dashes.
    help
        What it does, as a half-sentence.
    metavar
        What its value is; empty: it takes none, or the parser says it.
    """

    flag: str
    help: str
    metavar: str = ""

    @property
    def sentence(self) -> str:
        """The help as a sentence of its own."""
        return f"{self.help[0].upper()}{self.help[1:]}."


TIER = RunOption(
    "--tier",
    "the nodes of a tier where they are not the machine's own, e.g. cxl=2,3; may be repeated "
    "(NAME=NODES:SIZE is NAME=NODES with --limit NAME=SIZE)",
    "NAME=NODES",
)
TUNE = RunOption(
    "--tune",
    "let the share of the host's weights on the far tier follow the time of the tokens; advice "
    "only, in the file of --events, without --tune-budget",
)
TUNE_BUDGET = RunOption(
    "--tune-budget", "weights that may move between two tokens, in the mean, e.g. 64MiB", "SIZE"
)
TUNE_STATE = RunOption("--tune-state", "a JSON file from which the next run goes on", "FILE")
STOP = RunOption("--stop", "end a row after this token", "TOKEN")
WARMUP = RunOption("--warmup", "generate one token before measuring")
