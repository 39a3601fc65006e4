"""What a run costs, from its flags alone: memory, floating-point operations, time (docs/scaling.md)."""
