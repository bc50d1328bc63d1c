"""Diagnosis of an attempt's failure from the traces of its processes."""
