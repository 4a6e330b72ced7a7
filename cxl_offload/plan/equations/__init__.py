"""Equations of memory and cost, each with its source and range of validity."""
