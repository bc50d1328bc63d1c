"""Models too large for one worker: built without values, cut, and filled with values afterwards."""
