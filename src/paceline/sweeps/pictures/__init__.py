"""Pictures of a sweep: history, parallel coordinates, importance of each hyperparameter; as PNG, and as one HTML file.

`sketch` says what is drawn and where, from 0 to 1; `svg` and `png` draw it.
"""
