"""Runs on this machine whose workers talk to each other, and those that wait in vain."""
