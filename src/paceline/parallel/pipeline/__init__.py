"""Pipeline parallelism: a model in stages on several workers. `timeline` and `cut` import only the standard library."""
