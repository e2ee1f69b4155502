"""The integer model as a C99 program that needs nothing else."""
