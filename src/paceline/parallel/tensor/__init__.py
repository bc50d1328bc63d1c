"""Single layers cut over the ranks of a tensor group: found, tried, applied, compared."""
