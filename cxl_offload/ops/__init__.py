"""Operators on tensors in tiers: validated Python over one-pass C++ kernels.

``ops.adam``, ``ops.adagrad`` and ``ops.lion`` are optimizer updates; ``ops.offload`` places the
states of any ``torch.optim`` optimizer.
"""
