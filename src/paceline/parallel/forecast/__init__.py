"""Forecasts of each layout's memory and time from measured blocks, for `explain` and "auto"."""
