"""Implementations of Horizon's names: functions and classes over fxquant's, which the tables of `fxquant.compat.horizon` refer to."""
