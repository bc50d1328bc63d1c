"""MLflow's stores over a workspace (`paceline://`): its tracking store, its registry, and runs as MLflow's entities."""
