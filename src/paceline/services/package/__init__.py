"""Write a folder that serves a model on other machines, with or without a container image."""
