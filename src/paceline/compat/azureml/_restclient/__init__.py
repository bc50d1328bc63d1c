"""A private package of the SDK, from which programs import the names of run states."""
