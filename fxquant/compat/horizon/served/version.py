"""The release of the plugin whose names are served: programs compare it before they import."""

__version__ = "3.3.4"
