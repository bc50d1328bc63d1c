"""Layouts in which every rank computes the whole model: replicated, or its parameters in equal parts."""
