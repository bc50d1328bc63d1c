"""Models that no worker holds whole: built without values, cut, and filled only then."""
