"""The part of Paceline that runs inside a worker, before the user's script: standard library alone, for any Python from 3.10."""
