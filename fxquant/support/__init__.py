"""Support for every package: checks of arguments, atomic files, locks across forks, progress bars, registries and seeds."""
