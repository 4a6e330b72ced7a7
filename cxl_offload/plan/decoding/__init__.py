"""Decoding with weights and KV cache off the accelerator, whoever runs it."""
