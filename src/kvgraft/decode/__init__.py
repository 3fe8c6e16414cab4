"""HOW a step attends: sparse attention in decode, as a program (Vortex)."""
