"""The output of workers: files, console, rotation."""
