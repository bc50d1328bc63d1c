"""Tensor parallelism: layers to cut over ranks are found, tried, cut and compared."""
