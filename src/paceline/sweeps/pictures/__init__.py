"""Pictures of a sweep, as PNG files and as one HTML file.

`figure_data` computes the marks and their places from 0 to 1. `svg` and `png` draw them.
"""
