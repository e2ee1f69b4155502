"""Implementations of Horizon's names: functions and classes over fxquant's, which the tables of `fxquant.compat.horizon` refer to."""

__version__ = "3.3.4"  # the plugin release whose names are served: programs compare it before they import
