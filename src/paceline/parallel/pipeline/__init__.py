"""A model in stages, one worker each. `timeline` and `cut` need only the standard library."""
