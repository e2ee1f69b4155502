"""Export of the integer model as a C99 program without dependencies."""
