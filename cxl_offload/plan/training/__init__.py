"""Plans for ZeRO-Offload: a step's time, and the home of every kind of tensor."""
