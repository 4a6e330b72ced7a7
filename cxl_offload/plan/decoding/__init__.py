"""Decoding with weights and KV cache off the accelerator, in any engine."""
