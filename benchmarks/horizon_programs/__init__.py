"""Programs written for Horizon's plugin, run as they are: the outcome of each, against the outcome that the program asks for."""
