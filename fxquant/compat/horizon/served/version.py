"""The plugin release whose names are supported: programs compare it before they import."""

__version__ = "3.3.4"
