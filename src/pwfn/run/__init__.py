"""A run in a folder: names resolved to network and data, checkpoints, forecast, console."""
