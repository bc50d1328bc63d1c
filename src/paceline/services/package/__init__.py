"""Write a folder from which a model can be served on other machines, as an image or without one."""
