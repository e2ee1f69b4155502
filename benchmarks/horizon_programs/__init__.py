"""Programs written for Horizon's plugin, run as they are: what becomes of each, against what it asks for."""
