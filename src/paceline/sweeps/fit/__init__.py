"""Whether a script can take what a space gives: known from its text, before the first trial."""
