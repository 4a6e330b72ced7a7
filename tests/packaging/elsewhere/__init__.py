"""Wheels for Pythons and processors that this machine does not have, built and tried on it."""
