"""Modules that run inside a worker before the user's script: standard library only, Python 3.10 or later."""
