"""``cxl-offload``: finds the subcommands, and turns errors into one line on stderr."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cxl_offload import cli
from cxl_offload.cli._ending import ended_by_sigterm, last_words
from cxl_offload.errors import CxlOffloadError

_INSTALLED_AS = {"yaml": "pyyaml"}
_EXIT_ERROR = 2
_HELP = ["-h", "--help"]


class _OneLineErrors(TyperGroup):
    """A command group whose errors, bad options included, are one line and exit status 2."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_types_of_flags(command, ctx)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types_of_flags(self, ctx)
        super().format_help(ctx, formatter)

    def make_context(self, info_name: Any, args: list[str], *more: Any, **extra: Any) -> Any:
        if not args or any(each in args for each in _HELP):  # else rich need not be loaded
            from cxl_offload.cli._help_table import keep_names_whole

            keep_names_whole()
        with _one_line_errors():
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _one_line_errors():
            return super().invoke(ctx)


def _hide_types_of_flags(command: Any, context: Any) -> None:
    """The help of a flag says nothing of a type: it takes no value."""
    for parameter in command.get_params(context):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _hide_types_of_flags(each, context)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stopped:
        line, status = last_words(stopped)
        print(line, file=sys.stderr)
        raise typer.Exit(status) from None
    except (MemoryError, OSError, ValueError, CxlOffloadError, ModuleNotFoundError) as error:
        if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) == errno.EPIPE:
            raise  # the reader of a pipe left: typer ends quietly
        if os.environ.get("CXL_OFFLOAD_DEBUG") == "1":
            raise
        _fail(_message(error))
    except Exception as error:
        # typer's own usage errors; their class is click's or typer's, depending on the version
        if not callable(getattr(error, "format_message", None)):
            raise
        _fail(_usage_message(error))


def _usage_message(error: Any) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "cxl-offload")
    return f"{error.format_message().rstrip('.')}. Try '{path} --help'."


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return (
            f"needs the Python package {error.name!r}, which is not installed: "
            f"pip install {_INSTALLED_AS.get(error.name, error.name)}"
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(message: str) -> None:
    print(f"cxl-offload: error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(_EXIT_ERROR)


def _show_version(wanted: bool) -> None:
    if wanted:
        from cxl_offload import __version__

        print(f"cxl-offload {__version__}")
        raise typer.Exit


def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """LLM tensors in DRAM and CXL memory tiers.

    Example: cxl-offload topology

    Exit status: 0 done; 1 a check found something (--strict, kv verify);
    2 an error, one line on stderr; 130 Ctrl-C; 143 SIGTERM; `run` that of its command.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def _modules() -> list[str]:
    """Of the subcommands, each of which has a module of its name."""
    found = [module.name for module in pkgutil.iter_modules(cli.__path__)]
    return [name for name in found if not name.startswith("_") and name != "main"]


@functools.cache
def _make_app(only: str | None = None) -> typer.Typer:
    """The command line with all subcommands, or with that of one module.

    Only what the called one needs is imported then, which is less than half for most.
    """
    made = typer.Typer(
        cls=_OneLineErrors,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": _HELP},
    )
    made.callback(invoke_without_command=True)(_start)
    for name in [only] if only else _modules():
        importlib.import_module(f"{cli.__name__}.{name}").register(made)
    return made


def _app_for(words: Sequence[str]) -> typer.Typer:
    """With the one subcommand that is called, or with all where a name is missing or unknown."""
    called = next((word for word in words if not word.startswith("-")), "")
    name = called.replace("-", "_")
    return _make_app(name if "_" not in called and name in _modules() else None)


def __getattr__(name: str) -> typer.Typer:
    """``app``, the whole command line, is made where somebody asks for it."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_app()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; the entry point of ``cxl-offload``.

    Parameters
    ----------
    arguments
        Without the program's name; the process's own by default.
    """
    if sys.stdout is None:  # closed by the caller (>&-): nobody reads it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the exit)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 still gets the tables
    words = sys.argv[1:] if arguments is None else arguments
    with ended_by_sigterm():
        _app_for(words)(args=arguments, prog_name="cxl-offload")


if __name__ == "__main__":
    main()
