"""A run in a folder: settings and data by name, checkpoints, forecast, console."""
