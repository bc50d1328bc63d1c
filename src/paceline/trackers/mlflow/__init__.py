"""MLflow's tracking store and model registry over a workspace (`paceline://`)."""
