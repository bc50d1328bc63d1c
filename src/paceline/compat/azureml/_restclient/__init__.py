"""A private package of the SDK, from which drivers take the states of runs."""
