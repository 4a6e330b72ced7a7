"""The placement contract: the same files run on the simulated kernel, on the host's Linux and in
every virtual machine of tests/vm; only the nodes differ.
"""
