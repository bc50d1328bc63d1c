"""A tracking store and a model registry for MLflow, whose data are in a workspace (`paceline://`)."""
