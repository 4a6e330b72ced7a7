"""The command line, one module a subcommand.

A module of this folder is a subcommand when it has ``register(app)``; main.py finds it. Names that
start with an underscore are not looked at. Such a module must be cheap to import: torch and the
frameworks are imported inside the command.
"""
