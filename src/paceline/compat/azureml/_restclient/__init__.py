"""A private package of the SDK, from which drivers import the names of run states."""
