"""What every room may use: checks of arguments, atomic files, locks across forks, progress bars, registries and seeds."""
