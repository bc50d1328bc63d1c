"""A model in stages, one worker each. `timeline`, `cut` and `picture` need the standard library alone."""
