"""Adapters that put other frameworks' tensors into the tiers of this package, one folder each."""
