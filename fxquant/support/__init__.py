"""Support for every room: checks of arguments, atomic files, locks across forks, progress bars, registries and seeds."""
