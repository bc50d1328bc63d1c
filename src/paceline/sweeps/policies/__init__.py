"""Policies that decide from all trials' curves which trials to stop early. The controller stops the trials."""
